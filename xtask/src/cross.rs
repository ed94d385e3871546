//! Builds programs for another architecture than this machine's, with rustup's target, and Debian's cross compiler as linker
//! and for C code. Both architectures use the same BPF object: both are little-endian, and no program reads CPU registers.

use std::{fmt, fs};

use anyhow::{Result, bail};

use crate::exec::{self, Cmd};
use crate::workspace::Workspace;
use crate::{apt, log};

/// An architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Arch {
    /// amd64
    #[cfg_attr(not(target_arch = "aarch64"), default)]
    #[value(name = "x86_64")]
    X86,
    /// arm64
    #[cfg_attr(target_arch = "aarch64", default)]
    #[value(name = "aarch64")]
    Arm,
}

impl Arch {
    /// This machine's architecture.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Arm } else { Self::X86 };

    /// Returns Debian's name of the architecture.
    pub const fn debian(self) -> &'static str {
        match self {
            Self::X86 => "amd64",
            Self::Arm => "arm64",
        }
    }

    /// Returns Rust's name of the target.
    pub const fn target(self) -> &'static str {
        match self {
            Self::X86 => "x86_64-unknown-linux-gnu",
            Self::Arm => "aarch64-unknown-linux-gnu",
        }
    }

    /// Returns the C compiler for the architecture, and its Debian package.
    const fn compiler(self) -> (&'static str, &'static str) {
        match self {
            Self::X86 => ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu"),
            Self::Arm => ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
        }
    }

    /// Returns the Debian package of the C library that the compiler links to.
    const fn library(self) -> &'static str {
        match self {
            Self::X86 => "libc6-dev-amd64-cross",
            Self::Arm => "libc6-dev-arm64-cross",
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}

/// Returns the name of a value on the command line.
pub fn name(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Finds or installs what cargo needs to build for another architecture.
pub fn prepare(arch: Arch) -> Result<()> {
    let (compiler, package) = arch.compiler();
    prepare_target(arch.target(), compiler, &[package, arch.library()])
}

/// Finds or installs the C compiler for a target, which is in these packages of Debian, and Rust's standard library.
pub fn prepare_target(target: &str, compiler: &str, packages: &[&str]) -> Result<()> {
    if exec::which(compiler).is_none() {
        if !apt::exists() {
            bail!("no {compiler} here; please install {} (Debian's names)", packages.join(" and "));
        }
        apt::install(packages)?;
    }
    let sysroot = Cmd::new("rustc").args(["--print", "sysroot"]).read()?;
    let library = format!("{}/lib/rustlib/{target}/lib", sysroot.trim());
    if fs::exists(&library).unwrap_or(false) {
        return Ok(());
    }
    if exec::which("rustup").is_none() {
        bail!(
            "rustc has no standard library for {target}, and rustup is not installed to get it; see https://rustup.rs"
        );
    }
    log::step(format_args!("rustup target add {target}"));
    Cmd::new("rustup").args(["target", "add", target]).run()
}

/// Changes a call of cargo to build for the architecture; its programs are then below `target/<the target's name>`.
pub fn cargo(cargo: Cmd, workspace: &Workspace, arch: Arch) -> Cmd {
    let (target, (compiler, _)) = (arch.target(), arch.compiler());
    let name = target.replace('-', "_");
    cargo
        .args(["--target", target])
        .env(format!("CARGO_TARGET_{}_LINKER", name.to_uppercase()), compiler)
        .env(format!("CC_{name}"), compiler)
        // With `--target`, the build script would look for the object below target/<target>, where it is not.
        .env("BALLAST_BPF_OBJECT", workspace.bpf_object())
}

/// Returns the name of a program of binutils for the architecture.
pub fn tool(arch: Arch, name: &str) -> String {
    if arch == Arch::HOST { name.to_owned() } else { arch.compiler().0.replace("gcc", name) }
}
