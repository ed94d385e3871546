//! `cargo xtask build`: builds the BPF object, then the agent, which embeds it.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use fs_err as fs;

use crate::cross::{self, Arch};
use crate::exec::{self, Cmd};
use crate::setup::{self, Need};
use crate::toolchain::{TARGET, Toolchain};
use crate::workspace::Workspace;
use crate::{log, object};

/// Which agent.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Args {
    /// Build the agent with optimisations, to target/release (the BPF programs are always optimised)
    #[arg(long, short)]
    pub release: bool,
    /// Features of proxy-user; `bpf-log` also builds the programs with their log lines
    #[arg(long, short = 'F', value_delimiter = ',')]
    pub features: Vec<String>,
    /// The architecture of the agent; for another one than this machine's, the output is in target/<target>/
    #[arg(long, value_enum, default_value_t)]
    pub target: Arch,
    /// Build the BPF object only
    #[arg(long)]
    pub bpf_only: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let workspace = Workspace::find()?;
    let object = bpf(&workspace, args)?;
    let made = if args.bpf_only { object } else { agent(&workspace, args)? };
    log::line(made.display());
    Ok(())
}

/// Builds the BPF object, checks it, and returns its path.
pub fn bpf(workspace: &Workspace, args: &Args) -> Result<PathBuf> {
    let toolchain = setup::toolchain(Need::Bpf)?;
    log::timed("build the BPF programs (about a minute on two cores, the first time)", || {
        build_bpf(workspace, &toolchain, args)
    })
}

/// Prepares a command that loads the programs: requires root, installs tools for network namespaces, builds the BPF object.
pub fn prepare_to_load(workspace: &Workspace, command: &str) -> Result<()> {
    exec::require_root("load programs", &format!("test {command}"))?;
    setup::tools(Need::Netns)?;
    bpf(workspace, &Args::default()).map(drop)
}

/// Returns the path of this `ballast`, or of one that it builds: without optimisations, which takes a third of the time, since
/// what matters runs in the kernel.
pub fn given_or_built(workspace: &Workspace, given: Option<&Path>) -> Result<PathBuf> {
    if let Some(file) = given {
        return file.canonicalize().with_context(|| format!("no file {}", file.display()));
    }
    bpf(workspace, &Args::default())?;
    agent(workspace, &Args::default())
}

fn build_bpf(workspace: &Workspace, toolchain: &Toolchain, args: &Args) -> Result<PathBuf> {
    let target_dir = workspace.target().join("bpf-build");
    let paths = path_remap_flags(workspace);
    let paths: Vec<_> = paths.iter().map(String::as_str).collect();
    let mut cargo = toolchain
        .cargo("build", &target_dir, &paths)
        .args(["-p", "proxy-ebpf", "--bin", "ballast-bpf", "--profile", "bpf"])
        .dir(workspace.root());
    if args.features.iter().any(|feature| feature == "bpf-log") {
        cargo = cargo.args(["--features", "log"]);
    }
    cargo.run()?;
    let built = target_dir.join(TARGET).join("bpf/ballast-bpf");
    let elf = fs::read(&built)?;
    let report = object::check(&elf).with_context(|| built.display().to_string())?;
    log::line(format_args!(
        "    {} programs, {} instructions, {} of {} bytes of stack, {} KiB",
        report.programs.len(),
        report.instructions,
        report.deepest.bytes,
        object::stack::LIMIT,
        elf.len() / 1024
    ));
    let elf = object::without_dwarf(&elf).with_context(|| built.display().to_string())?;
    for call in report.slow_calls {
        log::line(format_args!("    note: {call}"));
    }
    let object = workspace.bpf_object();
    let without_lines = object::without_lines(&elf).with_context(|| built.display().to_string())?;
    write_if_changed(&workspace.bpf_object_with_lines(), &elf)?;
    write_if_changed(&object, &without_lines)?;
    Ok(object)
}

/// Returns the flags that make rustc leave this machine's paths out of its output, so that the same sources give the same
/// bytes everywhere. BTF and panics name source files.
pub fn path_remap_flags(workspace: &Workspace) -> Vec<String> {
    let home = |variable: &str, folder: &str| {
        let named = std::env::var_os(variable).map(PathBuf::from);
        named.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(folder)))
    };
    let shown = [
        (Some(workspace.root().to_owned()), "/ballast"),
        (home("CARGO_HOME", ".cargo"), "/cargo"),
        (home("RUSTUP_HOME", ".rustup"), "/rustup"),
    ];
    let flag = |(path, name): (Option<PathBuf>, &str)| {
        path.map(|path| format!("--remap-path-prefix={}={name}", path.display()))
    };
    shown.into_iter().filter_map(flag).collect()
}

/// Builds the agent with the object inside and returns the path of the binary.
pub fn agent(workspace: &Workspace, args: &Args) -> Result<PathBuf> {
    let patience = if args.release { "about 5 minutes" } else { "about 2 minutes" };
    log::timed(&format!("build the agent ({patience} on two cores, the first time)"), || {
        let mut cargo =
            Cmd::cargo().args(["build", "-p", "proxy-user", "--bin", "ballast"]).dir(workspace.root());
        if args.release {
            cargo = cargo.arg("--release");
        }
        if !args.features.is_empty() {
            cargo = cargo.args(["--features", &args.features.join(",")]);
        }
        if args.target == Arch::HOST {
            cargo.run()?;
            return Ok(workspace.binary(args.release));
        }
        cross::prepare(args.target)?;
        cross::cargo(cargo, workspace, args.target).run()?;
        let folder = workspace.target().join(args.target.target());
        Ok(folder.join(if args.release { "release" } else { "debug" }).join("ballast"))
    })
}

/// Writes a file unless it already has this content: cargo then sees no change and rebuilds nothing.
pub fn write_if_changed(path: &Path, content: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().unwrap_or(path))?;
    Ok(fs::write(path, content)?)
}
