//! Creates the pinned maps and loads the programs from the BPF object.

use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::{fs, io, thread};

use aya::maps::{Array, MapInfo};
use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};
use aya_obj::Object;
use proxy_common::config::NodeConfig;
use proxy_common::flow::buckets_for;
use proxy_common::map_names as names;

use super::error::Error;
use super::hooks::{CLOCK, Direction, SOCKET_HOOKS};
use super::notice::StartNotice;
use super::pins::{Paths, Pins};
use super::program::{program_mut, refused};
use super::settings::Capacities;
use super::{calls, clock, kernel, program};
use crate::maps::segments::{self, SegmentShape};
use crate::maps::sys;

/// The variable that makes programs measure how long endpoints take to answer (`--connect-latency`).
const MEASURES_LATENCY: &str = "CONNECT_LATENCY";

/// The properties of a map that are compared between the object and a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    kind: u32,
    key_size: u32,
    value_size: u32,
    flags: u32,
    max_entries: u32,
}

/// What to do with a pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Use it.
    Fits,
    /// Use it: only its size differs.
    OtherSize,
    /// Never use it, for this reason.
    Refuse(String),
}

impl Shape {
    fn of(map: &aya_obj::Map, max_entries: u32) -> Self {
        let (kind, flags) = (map.map_type(), map.map_flags());
        Self { kind, key_size: map.key_size(), value_size: map.value_size(), flags, max_entries }
    }

    /// Returns the shape of the map pinned at `path`, or why it is no map; `None` if nothing is pinned there.
    fn pinned(path: &Path) -> Result<Option<Result<Self, String>>, Error> {
        let read = || -> io::Result<Self> {
            path.symlink_metadata()?;
            let info = MapInfo::from_pin(path).map_err(sys::io_error)?;
            Ok(Self {
                kind: info.map_type().map_err(sys::io_error)? as u32,
                key_size: info.key_size(),
                value_size: info.value_size(),
                flags: info.map_flags(),
                max_entries: info.max_entries(),
            })
        };
        match read() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            found => found.map_or_else(|error| no_map(path, error).map(Err), |shape| Ok(Ok(shape))).map(Some),
        }
    }

    /// Decides whether a pin of shape `found` can be used for the map that `self` describes.
    pub(super) fn judge(self, found: Self) -> Verdict {
        let Self { kind, key_size, value_size, flags, max_entries } = self;
        let differences: Vec<_> = [
            ("type", kind, found.kind),
            ("key size", key_size, found.key_size),
            ("value size", value_size, found.value_size),
            ("flags", flags, found.flags),
        ]
        .into_iter()
        .filter(|(_, wanted, found)| wanted != found)
        .map(|(what, wanted, found)| format!("{what} {found} instead of {wanted}"))
        .collect();
        match differences.is_empty() {
            false => Verdict::Refuse(differences.join(", ")),
            true if found.max_entries != max_entries => Verdict::OtherSize,
            true => Verdict::Fits,
        }
    }
}

/// Returns why a pin is no map, if the error proves it. Any other failure to open it is returned: a process without free file
/// descriptors cannot open a map either, and must not throw it away.
pub(super) fn no_map(path: &Path, error: io::Error) -> Result<String, Error> {
    let is_other_file = path.symlink_metadata().is_ok_and(|found| !found.is_file());
    // `None`: the kernel's description of the object is not that of a map.
    let is_proven = is_other_file || matches!(error.raw_os_error(), None | Some(libc::EINVAL | libc::ENOENT));
    if is_proven { Ok(format!("not a map ({error})")) } else { Err(Error::file("open the map", path)(error)) }
}

/// The object, loaded into the kernel.
pub(super) struct Loaded {
    /// Keeps the programs open.
    pub ebpf: Ebpf,
    /// The notices for the operator.
    pub notices: Vec<StartNotice>,
    /// Whether the programs that are attached now use the same maps.
    pub is_current: bool,
    /// Jiffies per second.
    pub hz: u32,
    /// Why the kernel rejected the XDP program. The agent continues without it: tc does all that XDP does.
    pub unusable_xdp: Option<Error>,
}

/// Creates or opens the maps, and loads the programs, including this XDP program.
pub(super) fn load(
    bytes: &[u8],
    pins: &Pins,
    capacities: &Capacities,
    xdp: Option<&'static str>,
) -> Result<Loaded, Error> {
    if bytes.is_empty() {
        return Err(Error::NoObject);
    }
    let mut object = Object::parse(bytes)?;
    let btf = load_btf(&mut object);
    let paths = pins.paths();
    let mut loader = EbpfLoader::new();
    // No program reads kernel types, so a kernel without BTF is sufficient, and aya does not parse its BTF.
    loader.btf(None);
    let mut notices: Vec<_> = kernel::adapt(&mut loader).into_iter().map(StartNotice::KernelLacks).collect();
    for name in names::SEGMENTED {
        notices.extend(open_segments(pins, name, segment_of(&object, name)?, btf.as_ref())?);
        loader.map_pin_path(name, paths.maps().join(name));
    }
    for name in names::ALL.iter().filter(|name| !names::SEGMENTED.contains(name)) {
        let map = object.maps.get(*name).ok_or(Error::Incomplete { kind: "map", name })?;
        let (max_entries, setting) = capacities.of(name).unwrap_or((map.max_entries(), ""));
        let path = paths.maps().join(name);
        let wanted = Shape::of(map, max_entries);
        match Shape::pinned(&path)?.map(|found| found.map(|found| (found, wanted.judge(found)))) {
            None => pins.remove_short_path(name)?,
            Some(Ok((_, Verdict::Fits))) => {}
            Some(Ok((found, Verdict::OtherSize))) => {
                let (kept, by_memory) = (found.max_entries, capacities.is_by_memory(name));
                notices.push(StartNotice::SizeKept { map: name, setting, kept, max_entries, by_memory });
            }
            Some(Ok((_, Verdict::Refuse(reason))) | Err(reason)) => {
                pins.remove_short_path(name)?;
                let moved_to = pins.refuse(&path)?;
                notices.push(StartNotice::PinRefused { map: name, reason, moved_to });
            }
        }
        loader.map_max_entries(name, max_entries).map_pin_path(name, path);
    }
    for name in names::OPTIONAL.iter().filter(|name| !names::SEGMENTED.contains(name)) {
        let map = object.maps.get(*name).ok_or(Error::Incomplete { kind: "map", name })?;
        let (max_entries, _) = capacities.of(name).unwrap_or((map.max_entries(), ""));
        let (path, wanted) = (paths.maps().join(name), Shape::of(map, max_entries));
        let found = Shape::pinned(&path)?;
        if found.is_some_and(|found| found.is_ok_and(|found| wanted.judge(found) != Verdict::Fits)) {
            fs::remove_file(&path).map_err(Error::file("remove", &path))?;
        }
        loader.map_max_entries(name, max_entries).map_pin_path(name, path);
    }
    if capacities.connect_latency {
        loader.override_global(MEASURES_LATENCY, &1u64, true);
    }
    let is_current = pins.is_current();
    let mut ebpf = loader.load(bytes).map_err(Box::new)?;
    // The kernel's tick does not change, and no pin survives a reboot: measure once.
    let stored = stored(&ebpf)?;
    let known = Some(stored.hz).filter(|hz| is_current && *hz > 0);
    let (hz, unusable_xdp) = load_programs(&mut ebpf, xdp, known)?;
    calls::connect(&mut ebpf)?;
    calls::keep(&ebpf, paths)?;
    configure(&mut ebpf, paths, &stored, hz, capacities)?;
    Ok(Loaded { ebpf, notices, is_current, hz, unusable_xdp })
}

/// Loads the object's type information into the kernel, for `bpftool`; `None`: the kernel does not accept it.
fn load_btf(object: &mut Object) -> Option<OwnedFd> {
    let btf = object.fixup_and_sanitize_btf(aya::features().btf()?).ok()??;
    sys::load_btf(&btf.to_bytes()).ok()
}

/// Returns the segments of a map that grows.
fn segment_of(object: &Object, name: &'static str) -> Result<aya_obj::Map, Error> {
    let map = object.maps.get(name).and_then(aya_obj::Map::inner);
    map.ok_or(Error::Incomplete { kind: "map", name })
}

/// Creates and pins the maps of the object that grow, with one segment each, for a test that loads the programs itself.
pub fn create_segments(bytes: &[u8], folder: &Path) -> Result<(), Error> {
    let mut object = Object::parse(bytes)?;
    let btf = load_btf(&mut object);
    for name in names::SEGMENTED {
        let btf = btf.as_ref().map(|btf| btf.as_fd());
        let created = segments::create(folder, name, segment_of(&object, name)?, btf);
        created.map_err(Error::file("create the map", &folder.join(name)))?;
    }
    Ok(())
}

/// Opens or creates a map that grows. A pin that is not such a map is moved out of the way.
fn open_segments(
    pins: &Pins,
    name: &'static str,
    segment: aya_obj::Map,
    btf: Option<&OwnedFd>,
) -> Result<Option<StartNotice>, Error> {
    let folder = pins.paths().maps();
    let shape = SegmentShape::wanted(&segment);
    let path = folder.join(name);
    let failed = |source| Error::File { action: "create the map", path: path.clone(), source };
    let mut notice = None;
    match segments::judge(&folder, name, shape) {
        None => pins.remove_short_path(name)?,
        Some(Ok(())) => {}
        Some(Err(error)) => {
            let reason = no_map(&path, error)?;
            pins.remove_short_path(name)?;
            let moved_to = pins.refuse(&path)?;
            segments::forget(&folder, name).map_err(failed)?;
            notice = Some(StartNotice::PinRefused { map: name, reason, moved_to });
        }
    }
    segments::create(&folder, name, segment, btf.map(|btf| btf.as_fd())).map_err(failed)?;
    Ok(notice)
}

/// Opens the object again, on the same maps, with these variables; loads none of its programs.
pub(super) fn open_on(bytes: &[u8], paths: &Paths, variables: &[(&str, u64)]) -> Result<Ebpf, Error> {
    let mut loader = EbpfLoader::new();
    loader.btf(None);
    for (name, value) in variables {
        loader.override_global(name, value, true);
    }
    for name in names::ALL.iter().chain(names::OPTIONAL) {
        loader.map_pin_path(name, paths.maps().join(name));
    }
    let latency = MapInfo::from_pin(paths.maps().join(names::CONNECT_LATENCY));
    if latency.is_ok_and(|map| map.max_entries() > 1) {
        loader.override_global(MEASURES_LATENCY, &1u64, true);
    }
    Ok(loader.load(bytes).map_err(Box::new)?)
}

/// Loads the packet programs again, on the same maps. `no_header`: for devices whose packets start with their IP header.
/// `opens`: whether they begin flows; otherwise they leave every packet without a flow to the rules behind them.
pub(super) fn load_packet_programs(
    bytes: &[u8],
    paths: &Paths,
    no_header: bool,
    opens: bool,
) -> Result<Ebpf, Error> {
    let mut variables = vec![("OPENS_FLOWS", opens.into())];
    if no_header {
        variables.push(("LINK_HEADER", 0));
    }
    let mut ebpf = open_on(bytes, paths, &variables)?;
    load_packet_path(&mut ebpf)?;
    calls::keep(&ebpf, paths)?;
    Ok(ebpf)
}

/// Returns the packet programs and the programs that they tail-call, largest first.
fn packet_programs() -> impl Iterator<Item = &'static str> {
    names::TAIL_CALL_TARGETS.into_iter().rev().chain(Direction::ALL.map(Direction::program))
}

/// Loads the packet programs and the programs that they tail-call.
pub fn load_packet_path(ebpf: &mut Ebpf) -> Result<(), Error> {
    program::load(program::pick(ebpf, packet_programs())?).into_iter().next().map_or(Ok(()), Err)?;
    calls::connect(ebpf)
}

/// Loads all programs. Returns the jiffies per second, which are measured unless they are `known`, and why the XDP program
/// cannot be used.
fn load_programs(
    ebpf: &mut Ebpf,
    xdp: Option<&'static str>,
    known: Option<u32>,
) -> Result<(u32, Option<Error>), Error> {
    let clock: &mut SchedClassifier = program_mut(ebpf, CLOCK)?;
    clock.load().map_err(refused(CLOCK))?;
    let sockets = SOCKET_HOOKS.map(|(name, _)| name);
    let all = [CLOCK].into_iter().chain(xdp).chain(packet_programs()).chain(sockets);
    let mut programs = program::pick(ebpf, all)?.into_iter();
    let clock = programs.next().and_then(|(_, clock)| <&SchedClassifier>::try_from(&*clock).ok());
    let clock = clock.ok_or(Error::Incomplete { kind: "program", name: CLOCK })?;
    let measure = || known.map_or_else(|| clock::measure_hz(clock), Ok);
    let (refused, hz) = thread::scope(|scope| {
        let measuring = thread::Builder::new().spawn_scoped(scope, measure);
        let refused = program::load(programs.collect());
        (refused, measuring.map_or_else(|_| measure(), program::join))
    });
    let is_xdp = |error: &Error| matches!(error, Error::Program { name, .. } if Some(*name) == xdp);
    let (mut unusable_xdp, refused): (Vec<_>, Vec<_>) = refused.into_iter().partition(is_xdp);
    refused.into_iter().next().map_or(Ok((hz?, unusable_xdp.pop())), Err)
}

/// Writes `config`. `stored`: its previous contents, zero in a new map; `hz`: jiffies per second.
fn configure(
    ebpf: &mut Ebpf,
    paths: &Paths,
    stored: &NodeConfig,
    hz: u32,
    capacities: &Capacities,
) -> Result<(), Error> {
    let failed = |source| Error::Map { name: names::CONFIG, source };
    let flows = capacities.flows.min(names::FIRST_FLOWS);
    let buckets = buckets_for(flows);
    // With another seed, or another number of buckets, the programs would not find any flow again.
    let seed = if stored.flow_seed != 0 { stored.flow_seed } else { random_seed() };
    let map = ebpf.map_mut(names::CONFIG).ok_or(Error::Incomplete { kind: "map", name: names::CONFIG })?;
    let mut map: Array<_, NodeConfig> = map.try_into().map_err(failed)?;
    let fresh = NodeConfig { limits: capacities.limits(), ..NodeConfig::new(hz, flows, buckets, seed) };
    // The settings of an earlier agent stay in force until this agent writes newer ones.
    let is_usable = stored.flow_seed != 0 && stored.abi == fresh.abi && stored.hz == fresh.hz;
    let config = if is_usable { NodeConfig { limits: fresh.limits, ..*stored } } else { fresh };
    // The programs of an earlier agent read the entries that `config` names, so these exist before.
    let tables = [(names::FLOWS, names::FLOW_INDEX), (names::FLOWS6, names::FLOW_INDEX6)];
    for (size, (flows, index)) in config.flows.iter().zip(tables) {
        let [first, second] = size.searched;
        let times = if capacities.connect_latency { 2 * size.entries } else { 0 };
        let buckets = size.buckets.max(first).max(second);
        for (name, len) in [(flows, size.entries), (index, buckets), (names::SYN_TIMES, times)] {
            let grown = segments::grow(&paths.maps(), name, len as usize);
            grown.map_err(Error::file("grow the map", &paths.maps().join(name)))?;
        }
    }
    if map.get(&0, 0).map_err(failed)? != config {
        map.set(0, config, 0).map_err(failed)?;
    }
    Ok(())
}

/// Returns the contents of `config`.
fn stored(ebpf: &Ebpf) -> Result<NodeConfig, Error> {
    let failed = |source| Error::Map { name: names::CONFIG, source };
    let map = ebpf.map(names::CONFIG).ok_or(Error::Incomplete { kind: "map", name: names::CONFIG })?;
    let map: Array<_, NodeConfig> = map.try_into().map_err(failed)?;
    map.get(&0, 0).map_err(failed)
}

/// Returns a random number that is not zero.
fn random_seed() -> u32 {
    // The standard library draws the keys of each hasher from the system's random numbers.
    let random = RandomState::new().hash_one(names::FLOW_INDEX);
    (random as u32).max(1)
}

/// The BPF object inside this binary; empty if the binary was built without one.
pub static EMBEDDED: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/ballast.bpf.o"));

/// Lets the kernel reclaim the memory of [`EMBEDDED`]. The kernel reads it from this program's file again when it is needed:
/// for a device without link-layer header, or to list sockets.
pub fn release_object() {
    let (page, start) = (rustix::param::page_size(), EMBEDDED.as_ptr().addr());
    let (first, end) = (start.next_multiple_of(page), (start + EMBEDDED.len()) / page * page);
    if first < end {
        let address = EMBEDDED.as_ptr().wrapping_add(first - start).cast_mut().cast();
        // SAFETY: whole pages of a constant, which are never written: the kernel reads the same bytes from the file again.
        // If the call fails, the pages stay in memory.
        let _ = unsafe { rustix::mm::madvise(address, end - first, rustix::mm::Advice::LinuxDontNeed) };
    }
}

#[cfg(test)]
mod tests {
    use aya::maps::MapData;

    use super::*;

    const WANTED: Shape = Shape { kind: 1, key_size: 8, value_size: 24, flags: 1, max_entries: 100 };

    #[test]
    fn a_pin_is_no_map_only_if_the_error_proves_it() {
        let directory = tempfile::tempdir().unwrap();
        let (folder, file) = (directory.path().join("folder"), directory.path().join("file"));
        fs::create_dir(&folder).unwrap();
        fs::write(&file, "").unwrap();
        let is_map = |path: &Path, code| no_map(path, io::Error::from_raw_os_error(code)).is_err();
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EACCES, libc::EPERM, libc::EINTR] {
            assert!(is_map(&file, code), "it may be one: {code}");
        }
        assert!(!is_map(&file, libc::EINVAL) && !is_map(&folder, libc::EACCES));
        assert!(no_map(&file, io::Error::other("another type")).is_ok());
    }

    #[test]
    fn only_the_size_of_a_pin_may_differ() {
        assert_eq!(WANTED.judge(WANTED), Verdict::Fits);
        assert_eq!(WANTED.judge(Shape { max_entries: 50, ..WANTED }), Verdict::OtherSize);
        let others = [
            Shape { kind: 2, ..WANTED },
            Shape { key_size: 20, ..WANTED },
            Shape { value_size: 16, ..WANTED },
            Shape { flags: 0, ..WANTED },
        ];
        for other in others {
            assert!(matches!(WANTED.judge(other), Verdict::Refuse(_)), "{other:?}");
        }
        let Verdict::Refuse(reason) = WANTED.judge(Shape { key_size: 4, value_size: 1, ..WANTED }) else {
            panic!("accepted")
        };
        assert_eq!(reason, "key size 4 instead of 8, value size 1 instead of 24");
    }

    #[test]
    fn nothing_and_no_object_are_not_taken_for_a_pin() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Shape::pinned(&directory.path().join("absent")).unwrap(), None);
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn segments_are_added_without_cap_sys_admin() {
        use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
        let folder = tempfile::tempdir().unwrap();
        rustix::mount::mount("bpf", folder.path(), "bpf", rustix::mount::MountFlags::empty(), None).unwrap();
        let mut object = Object::parse(EMBEDDED).unwrap();
        let btf = load_btf(&mut object).unwrap();
        // Those of this thread.
        let all = capabilities(None).unwrap();
        set_capabilities(
            None,
            CapabilitySets { effective: all.effective.difference(CapabilitySet::SYS_ADMIN), ..all },
        )
        .unwrap();
        let refused = names::SEGMENTED.iter().filter_map(|name| {
            let segment = segment_of(&object, name).unwrap();
            let further = segment.max_entries() as usize + 1;
            segments::create(folder.path(), name, segment, Some(btf.as_fd())).unwrap();
            Some((name, segments::grow(folder.path(), name, further).err()?.to_string()))
        });
        let refused: Vec<_> = refused.collect();
        set_capabilities(None, all).unwrap();
        rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
        assert_eq!(refused, []);
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn every_segment_has_the_types_by_which_bpftool_prints_fields() {
        let folder = tempfile::tempdir().unwrap();
        rustix::mount::mount("bpf", folder.path(), "bpf", rustix::mount::MountFlags::empty(), None).unwrap();
        let mut object = Object::parse(EMBEDDED).unwrap();
        let btf = load_btf(&mut object).unwrap();
        let kinds = names::SEGMENTED.iter().map(|name| {
            let segment = segment_of(&object, name).unwrap();
            let further = segment.max_entries() as usize + 1;
            segments::create(folder.path(), name, segment, Some(btf.as_fd())).unwrap();
            segments::grow(folder.path(), name, further).unwrap();
            let segment = MapData::from_pin(folder.path().join(format!("segments/{name}_1"))).unwrap();
            let (map, types) = sys::definition(segment.fd().as_fd()).unwrap();
            matches!(map, aya_obj::Map::Btf(_)) && types.is_some()
        });
        let untyped: Vec<_> =
            names::SEGMENTED.iter().zip(kinds.collect::<Vec<_>>()).filter(|(_, is)| !is).collect();
        rustix::mount::unmount(folder.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
        assert_eq!(untyped, []);
    }
}
