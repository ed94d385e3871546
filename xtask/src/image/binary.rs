//! Builds the agent as one static binary, which runs in an image without a C library and on any node.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use fs_err as fs;
use object::elf::PT_INTERP;
use object::read::elf::{ElfFile64, ProgramHeader as _};
use object::{Endianness, Object as _};

use crate::cross::{self, Arch};
use crate::exec::Cmd;
use crate::workspace::{self, Workspace};
use crate::{build, cargotools, log};

/// Name of the plugin of kubectl.
pub const PLUGIN: &str = "kubectl-ballast";

/// Builds the agent for an architecture and returns its path. Unless `dev`, the plugin of kubectl is beside it.
pub fn build(workspace: &Workspace, arch: Arch, dev: bool) -> Result<PathBuf> {
    let object = workspace.bpf_object();
    ensure!(object.exists(), "there is no BPF object at {}", object.display());
    let target = if arch == Arch::HOST { host_target()? } else { arch.target().to_owned() };
    // Unless they are packed, the relocations of a static position-independent program are a twentieth of its size.
    let mut flags = ["-Ctarget-feature=+crt-static", "-Clink-arg=-Wl,-z,pack-relative-relocs"]
        .map(str::to_owned)
        .to_vec();
    flags.extend(build::path_remap_flags(workspace));
    // `--target` is given even for the host: without it, the flags would also apply to build scripts and proc macros, which
    // cannot be static.
    let mut args = vec!["build", "--locked", "-p", "proxy-user", "--bin", "ballast"];
    let mut programs = vec!["ballast"];
    if !dev {
        // In the same build, because another selection of crates would build their dependencies again.
        args.extend(["-p", "proxy-cli", "--bin", PLUGIN]);
        programs.push(PLUGIN);
    }
    // The released binary contains the list of its crates, which `cargo audit bin` reads.
    let cargo = if dev { Cmd::cargo() } else { cargotools::cargo(cargotools::AUDITABLE)? };
    let cargo = if arch == Arch::HOST {
        // With `--target`, the build script would look for the object below target/<target>, where it is not.
        cargo.args(args).args(["--target", &target]).env("BALLAST_BPF_OBJECT", &object)
    } else {
        cross::prepare(arch)?;
        cross::cargo(cargo.args(args), workspace, arch)
    };
    let mut cargo = cargo
        .arg("--target-dir")
        .arg(workspace.target())
        .dir(workspace.root())
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        // `split` moves debug information and symbols into a separate file.
        .env("CARGO_PROFILE_RELEASE_STRIP", "none");
    if !dev {
        cargo = cargo.arg("--release");
        // proxy-core/src/docs.rs
        cargo = workspace::docs().into_iter().fold(cargo, |cargo, docs| cargo.env("BALLAST_DOCS", docs));
    }
    log::timed("build the static agent", || cargo.run())?;
    let folder = if dev { "debug" } else { "release" };
    let folder = workspace.target().join(&target).join(folder);
    for path in programs.iter().map(|program| folder.join(program)) {
        let elf = fs::read(&path)?;
        require_static(&elf).with_context(|| path.display().to_string())?;
        split(&path, arch)?;
    }
    Ok(folder.join("ballast"))
}

/// Returns the path of the file with the debug information of a program.
pub fn debug_of(program: &Path) -> PathBuf {
    program.with_extension("debug")
}

/// Moves debug information and symbols into the file [`debug_of`]. gdb, addr2line and the backtraces of Rust's standard
/// library find it by the link in the program, in the program's folder or below /usr/lib/debug.
pub fn split(program: &Path, arch: Arch) -> Result<()> {
    let debug = debug_of(program);
    let stripped = program.with_extension("stripped");
    let tool = cross::tool(arch, "objcopy");
    let objcopy = |flags: &[&str]| Cmd::new(&tool).args(flags);
    objcopy(&["--only-keep-debug", "--compress-debug-sections"]).arg(program).arg(&debug).run()?;
    let link = format!("--add-gnu-debuglink={}", debug.display());
    objcopy(&["--strip-all", &link]).arg(program).arg(&stripped).run()?;
    // A rename leaves cargo's own copy of the program unchanged.
    Ok(fs::rename(&stripped, program)?)
}

/// Returns rustc's name of this machine's target.
pub fn host_target() -> Result<String> {
    rustc_says("host")
}

/// Returns the value with this name in the output of `rustc -vV`.
pub fn rustc_says(name: &str) -> Result<String> {
    let output = Cmd::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("-vV").read()?;
    let found = output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    found.map(str::to_owned).with_context(|| format!("rustc does not print its {name}"))
}

/// Returns an error if the program needs more than the kernel: an interpreter or a shared library.
fn require_static(elf: &[u8]) -> Result<()> {
    let file = ElfFile64::<Endianness>::parse(elf).context("not an ELF file of 64 bits")?;
    let endian = file.endian();
    if file.elf_program_headers().iter().any(|header| header.p_type(endian) == PT_INTERP) {
        bail!(
            "the binary needs a dynamic loader: it is not linked statically (is the .a file of the C library missing?)"
        );
    }
    let libraries = file.imports().context("cannot read what it imports")?;
    if let Some(import) = libraries.first() {
        bail!("it imports `{}`", String::from_utf8_lossy(import.name()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_information_and_symbols_are_in_a_file_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        let has_debug = |path: &Path| {
            let elf = fs::read(path).unwrap();
            let file = object::File::parse(&*elf).unwrap();
            let has = |name: &str| object::Object::section_by_name(&file, name).is_some();
            (has(".debug_info") || has(".debug_line"), has(".symtab"), has(".gnu_debuglink"))
        };
        assert_eq!(has_debug(&program), (true, true, false));
        split(&program, Arch::HOST).unwrap();
        assert_eq!(has_debug(&program), (false, false, true));
        let (debug, symbols, _) = has_debug(&debug_of(&program));
        assert!(debug && symbols);
        assert!(Cmd::new(&program).arg("--list").succeeds(), "it still runs");
    }

    /// Set in the process that the test below starts of itself.
    const CHILD: &str = "BALLAST_TEST_BACKTRACE";

    #[test]
    fn a_backtrace_has_names_where_the_debug_information_is() {
        let name = "image::binary::tests::a_backtrace_has_names_where_the_debug_information_is";
        if std::env::var_os(CHILD).is_some() {
            return println!("{}", std::backtrace::Backtrace::force_capture());
        }
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        split(&program, Arch::HOST).unwrap();
        let has_names = || {
            let child = Cmd::new(&program).args(["--exact", name, "--nocapture"]).env(CHILD, "1");
            child.read().unwrap().contains("image/binary.rs:")
        };
        assert!(has_names());
        fs::remove_file(debug_of(&program)).unwrap();
        assert!(!has_names());
    }

    #[test]
    fn a_program_that_needs_a_loader_is_not_static() {
        // Test programs are linked dynamically, and need a loader.
        let elf = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(require_static(&elf).unwrap_err().to_string().contains("loader"));
    }
}
