//! Loads every program in every mode, as the agent does, and reports the verifier's statistics. aya discards the log of
//! a program that the verifier accepts; so aya prepares the object, and this module makes the load call.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::{fmt, io};

use anyhow::{Context as _, Result, bail, ensure};
use aya::Btf;
use aya::maps::MapData;
use aya_obj::btf::BtfKind;
use aya_obj::generated::{BPF_F_XDP_HAS_FRAGS, bpf_attach_type, bpf_cmd, bpf_map_type, bpf_prog_type};
use aya_obj::{EbpfSectionKind, Function, Object, Program, ProgramSection};
use proxy_user::maps::segments;
use proxy_user::maps::sys::{self, attr, bpf, bpf_fd};
use proxy_user::programs::{EMBEDDED, Iterated, MissingFeature};

/// Prefix of the lines that `cargo xtask test --kernel` reads.
const MARK: &str = "verified";
/// `BPF_LOG_STATS` of `include/linux/bpf_verifier.h`: only the statistics are logged.
const STATS: u32 = 4;
/// Size of the log in bytes. The verifier stops if its log is full; the statistics take a few lines.
const LOG: usize = 1 << 16;
/// Entries of each map: the number does not matter to the verifier, and an emulated machine has little memory.
const ENTRIES: u32 = 64;

/// Global variables that the agent sets before it loads: a mode of the packet programs, or what the kernel lacks.
type Variables = Vec<(&'static str, u64)>;

/// Statistics of the verification of a program.
struct Cost {
    instructions: u64,
    /// Size of the largest stack frame in bytes.
    frame: u64,
    microseconds: u64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\t{}\t{}", self.instructions, self.frame, self.microseconds)
    }
}

/// Loads every program in every mode, prints a line for each, and fails if the kernel refuses one that it should accept.
pub fn all() -> Result<()> {
    let errors = u64::from(!MissingFeature::SocketErrors.is_missing());
    let mut refused = Vec::new();
    for (mode, variables) in modes() {
        let mut loader = Loader::new(&[variables, vec![("SOCKET_ERRORS", errors)]].concat())?;
        for name in loader.names() {
            let program = loader.object.programs.get(&name).context("no such program")?;
            let is_packets = matches!(program.section, ProgramSection::SchedClassifier);
            let is_tool = ["nop", "xdp_nop", "clock"].contains(&&*name);
            // Only packet programs have modes.
            if !mode.is_empty() && (!is_packets || is_tool) {
                continue;
            }
            // Without the iterator, the agent enters each network namespace.
            let may_lack = match program.section {
                ProgramSection::Xdp { .. } => MissingFeature::Xdp.is_missing(),
                ProgramSection::Iter { .. } => name == Iterated::All.names().0,
                _ => false,
            };
            match loader.load(&name) {
                Ok(cost) => line(&format!("{MARK}\t{name}\t{mode}\t{cost}")),
                Err(_) if may_lack => line(&format!("{MARK}\t{name}\t{mode}\t-")),
                Err(error) => refused.push(format!("{name} ({mode}): {error:#}")),
            }
        }
    }
    ensure!(refused.is_empty(), "refused:\n{}", refused.join("\n"));
    Ok(())
}

fn line(text: &str) {
    use io::Write as _;
    let _ = writeln!(io::stdout(), "{text}");
}

/// Returns the modes of `programs::object::load_packet_programs`, and the plain mode, whose name is empty.
fn modes() -> Vec<(String, Variables)> {
    let headers = [("", vec![]), ("no header", vec![("LINK_HEADER", 0)])];
    let opens = [("", 1), ("no new flows", 0)];
    let one = |(header, variables): &(&str, Variables), (word, number): (&str, u64)| {
        let words: Vec<_> = [*header, word].into_iter().filter(|word| !word.is_empty()).collect();
        (words.join(", "), [variables.clone(), vec![("OPENS_FLOWS", number)]].concat())
    };
    let plain = headers.iter().flat_map(|header| opens.map(|one_of| one(header, one_of)));
    let latency = |(header, variables): &(&str, Variables)| {
        let words: Vec<_> = [*header, "latency"].into_iter().filter(|word| !word.is_empty()).collect();
        (words.join(", "), [variables.clone(), vec![("CONNECT_LATENCY", 1)]].concat())
    };
    plain.chain(headers.iter().map(latency)).collect()
}

/// The object, with its own maps.
struct Loader {
    object: Object,
    types: Option<OwnedFd>,
    /// The kernel's BTF, read when the first iterator needs it.
    kernel: Option<Btf>,
    _maps: Vec<MapData>,
    _outer: Vec<OwnedFd>,
}

impl Loader {
    fn new(variables: &Variables) -> Result<Self> {
        let mut object = Object::parse(EMBEDDED)?;
        let bytes: BTreeMap<_, _> =
            variables.iter().map(|(name, value)| (*name, value.to_ne_bytes())).collect();
        let globals = bytes.iter().map(|(name, value)| (*name, (value.as_slice(), true))).collect();
        object.patch_map_data(globals)?;
        let features = aya::features().btf().context("this kernel knows no BTF")?;
        let types = object.fixup_and_sanitize_btf(features)?.map(|types| sys::load_btf(&types.to_bytes()));
        let types = types.transpose().context("the object's types")?;
        let mut fds = Vec::new();
        let (mut maps, mut outer) = (Vec::new(), Vec::new());
        for (name, mut map) in object.maps.clone() {
            let is_data = map.section_kind() != EbpfSectionKind::BtfMaps;
            // The size of a ring buffer is in bytes of memory pages.
            let is_ring = map.map_type() == bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32;
            if !is_data && !is_ring {
                let entries = map.max_entries().min(ENTRIES);
                map.set_max_entries(entries);
            }
            if let Some(segment) = map.inner() {
                let made = MapData::create(segment, &name, types.as_ref().map(OwnedFd::as_fd))?;
                let fd = segments::create_outer(&name, &made)?;
                fds.push((name, fd.as_raw_fd(), map));
                maps.push(made);
                outer.push(fd);
                continue;
            }
            let made = MapData::create(map.clone(), &name, types.as_ref().map(OwnedFd::as_fd))?;
            let fd = made.fd().as_fd().as_raw_fd();
            if is_data {
                fill(fd, map.data(), map.section_kind() == EbpfSectionKind::Rodata)
                    .with_context(|| name.clone())?;
            }
            fds.push((name, fd, map));
            maps.push(made);
        }
        let text = object.functions.keys().map(|(section, _)| *section).collect();
        object.relocate_maps(fds.iter().map(|(name, fd, map)| (name.as_str(), *fd, map)), &text)?;
        object.relocate_calls(&text)?;
        Ok(Self { object, types, kernel: None, _maps: maps, _outer: outer })
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.object.programs.keys().cloned().collect();
        names.sort();
        names
    }

    fn load(&mut self, name: &str) -> Result<Cost> {
        let over = [Iterated::Udp, Iterated::Tcp, Iterated::All].map(Iterated::names);
        let over = over.into_iter().find(|(program, _)| *program == name);
        let iterated = over.map_or(Ok(0), |(_, over)| self.iterated(over))?;
        let program = self.object.programs.get(name).context("no such program")?;
        let function = self.object.functions.get(&program.function_key()).context("no such function")?;
        let log = load(program, function, self.types.as_ref(), iterated)?;
        cost(&log).with_context(|| format!("a log without numbers: {log}"))
    }

    /// Returns the kernel's BTF id of the iterator over `over`.
    fn iterated(&mut self, over: &str) -> Result<u32> {
        if self.kernel.is_none() {
            self.kernel = Some(Btf::from_sys_fs()?);
        }
        let types = self.kernel.as_ref().context("read above")?;
        Ok(types.id_by_type_name_kind(&format!("bpf_iter_{over}"), BtfKind::Func)?)
    }
}

/// Program type, attach type and flags of a program, as the kernel needs them.
struct ProgramKind {
    program: bpf_prog_type,
    attach: u32,
    flags: u32,
}

fn kind(program: &Program) -> Result<ProgramKind> {
    let plain = |program| ProgramKind { program, attach: 0, flags: 0 };
    Ok(match &program.section {
        ProgramSection::SchedClassifier => plain(bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS),
        ProgramSection::SockOps => ProgramKind {
            attach: bpf_attach_type::BPF_CGROUP_SOCK_OPS as u32,
            ..plain(bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS)
        },
        ProgramSection::CgroupSockAddr { attach_type } => ProgramKind {
            attach: bpf_attach_type::from(*attach_type) as u32,
            ..plain(bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK_ADDR)
        },
        ProgramSection::CgroupSock { attach_type } => ProgramKind {
            attach: bpf_attach_type::from(*attach_type) as u32,
            ..plain(bpf_prog_type::BPF_PROG_TYPE_CGROUP_SOCK)
        },
        ProgramSection::Xdp { frags, .. } => ProgramKind {
            attach: bpf_attach_type::BPF_XDP as u32,
            flags: if *frags { BPF_F_XDP_HAS_FRAGS } else { 0 },
            ..plain(bpf_prog_type::BPF_PROG_TYPE_XDP)
        },
        ProgramSection::Iter { .. } => ProgramKind {
            attach: bpf_attach_type::BPF_TRACE_ITER as u32,
            ..plain(bpf_prog_type::BPF_PROG_TYPE_TRACING)
        },
        other => bail!("no agent loads programs of section {other:?}"),
    })
}

/// Loads a program, and returns the verifier's log. The program is unloaded at once.
fn load(program: &Program, function: &Function, types: Option<&OwnedFd>, iterated: u32) -> Result<String> {
    let kind = kind(program)?;
    let functions = function.func_info.func_info_bytes();
    let mut log = vec![0u8; LOG];
    let mut attr = attr();
    attr.__bindgen_anon_3.prog_type = kind.program as u32;
    attr.__bindgen_anon_3.insn_cnt = function.instructions.len() as u32;
    attr.__bindgen_anon_3.insns = function.instructions.as_ptr() as u64;
    attr.__bindgen_anon_3.license = program.license.as_ptr() as u64;
    attr.__bindgen_anon_3.log_level = STATS;
    attr.__bindgen_anon_3.log_size = LOG as u32;
    attr.__bindgen_anon_3.log_buf = log.as_mut_ptr() as u64;
    attr.__bindgen_anon_3.prog_flags = kind.flags;
    attr.__bindgen_anon_3.expected_attach_type = kind.attach;
    attr.__bindgen_anon_3.prog_btf_fd = types.map_or(0, |fd| fd.as_raw_fd().cast_unsigned());
    // The embedded object has no source lines.
    attr.__bindgen_anon_3.func_info_rec_size = function.func_info_rec_size as u32;
    attr.__bindgen_anon_3.func_info = functions.as_ptr() as u64;
    attr.__bindgen_anon_3.func_info_cnt =
        functions.len().checked_div(function.func_info_rec_size).unwrap_or(0) as u32;
    attr.__bindgen_anon_3.attach_btf_id = iterated;
    // SAFETY: everything that the attribute points to outlives the call, which returns a descriptor.
    let loaded = unsafe { bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr) };
    let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
    let said = String::from_utf8_lossy(said).into_owned();
    loaded.with_context(|| said.clone())?;
    Ok(said)
}

/// Returns the numbers in the verifier's log; `None` if one is missing.
fn cost(log: &str) -> Option<Cost> {
    let after = |words: &str| {
        let rest = log.lines().find_map(|line| line.trim().strip_prefix(words))?;
        rest.split_whitespace().next().map(str::to_owned)
    };
    let frames = after("stack depth")?;
    Some(Cost {
        instructions: after("processed")?.parse().ok()?,
        frame: frames.split('+').filter_map(|bytes| bytes.parse().ok()).max()?,
        microseconds: after("verification time")?.parse().ok()?,
    })
}

/// Writes a section into its map, and freezes the map if it is read-only, so that the verifier knows its contents.
fn fill(map: RawFd, bytes: &[u8], is_constant: bool) -> Result<()> {
    let key = 0u32;
    let mut update = attr();
    update.__bindgen_anon_2.map_fd = map.cast_unsigned();
    update.__bindgen_anon_2.key = (&raw const key) as u64;
    update.__bindgen_anon_2.__bindgen_anon_1.value = bytes.as_ptr() as u64;
    // SAFETY: the map is an array with one element of the section's size.
    unsafe { bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut update) }?;
    if is_constant {
        let mut freeze = attr();
        freeze.__bindgen_anon_2.map_fd = map.cast_unsigned();
        // SAFETY: the command reads one number.
        unsafe { bpf(bpf_cmd::BPF_MAP_FREEZE, &mut freeze) }?;
    }
    Ok(())
}
