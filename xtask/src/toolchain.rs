//! What the BPF programs are compiled with: a rustc that has `core` for the BPF target, and a linker for it.
//!
//! Two kinds of rustc do: a rustup nightly with `rust-src`, which builds `core` itself, and a distribution's
//! rustc with a ready `core`. The linker must know at least the LLVM that rustc was built with.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};

use crate::exec::{self, Cmd};
use crate::{apt, linker, log};

/// The nightly we install. A fixed one: a newer LLVM than the linker's cannot be linked.
const NIGHTLY: &str = "nightly-2026-05-20";
/// The distribution's compiler, by its path: rustup's comes first in most people's `PATH`.
const DISTRIBUTION: &str = "/usr/bin/rustc";
/// Debian's rustc that follows upstream, and its `core` for BPF.
const PACKAGES: [&str; 2] = ["rustc-web", "libstd-rust-web-dev-bpf"];
/// Longer than a slow line needs for 200 MB, shorter than a person's patience with a closed one.
const RUSTUP_LIMIT: Duration = Duration::from_mins(5);

/// The BPF target of a machine with our byte order.
pub const TARGET: &str =
    if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };

/// A rustc that has, or can build, `core` for [`TARGET`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// A rustup toolchain with `rust-src`, by its rustup name.
    Nightly(String),
    /// A rustc with a ready `core`, by its path.
    Distribution(PathBuf),
}

/// A compiler and a linker that fit each other.
#[derive(Clone, Debug)]
pub struct Toolchain {
    compiler: Compiler,
    linker: PathBuf,
    installed: Vec<String>,
}

impl Compiler {
    /// Every usable compiler that is there, the preferred one first.
    fn present() -> Vec<Self> {
        let mut found = nightlies();
        found.extend(Self::distribution());
        found
    }

    fn distribution() -> Option<Self> {
        let libdir = Cmd::new(DISTRIBUTION)
            .args(["--print", "target-libdir", "--target", TARGET])
            .without_env("LD_LIBRARY_PATH");
        let libdir = PathBuf::from(libdir.try_read()?.trim());
        let has_core = std::fs::read_dir(libdir).ok()?.flatten().any(|file| {
            let name = file.file_name();
            name.to_string_lossy().starts_with("libcore-")
        });
        has_core.then(|| Self::Distribution(DISTRIBUTION.into()))
    }

    /// The major version of the LLVM inside, e.g. 22.
    fn llvm(&self) -> Result<u32> {
        let text = match self {
            Self::Nightly(name) => Cmd::new("rustup").args(["run", name, "rustc", "-vV"]),
            Self::Distribution(rustc) => Cmd::new(rustc).arg("-vV"),
        };
        llvm_of(&text.without_env("LD_LIBRARY_PATH").read()?)
            .ok_or_else(|| anyhow!("{self} does not print its LLVM version"))
    }

    /// A cargo that compiles with it.
    fn cargo(&self) -> Cmd {
        let cargo = match self {
            // `rustup run` sets its own; what the cargo above us set would win over it.
            Self::Nightly(name) => Cmd::new("rustup")
                .args(["run", name, "cargo"])
                .without_env("RUSTUP_TOOLCHAIN")
                .without_env("RUSTC")
                .without_env("CARGO"),
            // `core`'s unstable parts are used on purpose: the target has no stable release.
            Self::Distribution(rustc) => Cmd::cargo().env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1"),
        };
        // Points at the libraries of the toolchain that runs us, not at this one's.
        cargo
            .without_env("LD_LIBRARY_PATH")
            .without_env("RUSTC_WRAPPER")
            .without_env("RUSTC_WORKSPACE_WRAPPER")
    }

    fn build_std(&self) -> &'static [&'static str] {
        match self {
            Self::Nightly(_) => &["-Z", "build-std=core"],
            Self::Distribution(_) => &[],
        }
    }
}

impl std::fmt::Display for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nightly(name) => write!(f, "rustup's {name} with rust-src"),
            Self::Distribution(rustc) => write!(f, "{} with its ready core", rustc.display()),
        }
    }
}

impl Toolchain {
    /// Finds a compiler and a linker that fit, and installs what is missing.
    pub fn setup() -> Result<Self> {
        let present = Compiler::present();
        for compiler in &present {
            let llvm = compiler.llvm()?;
            if let Some(linker) = linker::find(llvm)? {
                return Ok(Self { compiler: compiler.clone(), linker, installed: Vec::new() });
            }
        }
        let mut reasons = Vec::new();
        for compiler in present {
            match Self::with_new_linker(compiler, Vec::new()) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => reasons.push(format!("{error:#}")),
            }
        }
        // Both come from one place with a fitting LLVM; a nightly is a second download of 200 MB.
        for install in [install_distribution, install_nightly] {
            match install().and_then(|compiler| {
                let what = compiler.to_string();
                Self::with_new_linker(compiler, vec![what])
            }) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => {
                    log::line(format_args!("    no: {error:#}"));
                    reasons.push(format!("{error:#}"));
                }
            }
        }
        bail!("no compiler for {TARGET}:\n  {}", reasons.join("\n  "))
    }

    fn with_new_linker(compiler: Compiler, mut installed: Vec<String>) -> Result<Self> {
        let llvm = compiler.llvm()?;
        let linker = if let Some(linker) = linker::find(llvm)? {
            linker
        } else {
            installed.push(format!("bpf-linker for LLVM {llvm}"));
            linker::install(llvm)?
        };
        Ok(Self { compiler, linker, installed })
    }

    /// What was taken and what was installed for it, in one line.
    #[must_use]
    pub fn describe(&self) -> String {
        let taken = format!("BPF programs: {}, {}", self.compiler, self.linker.display());
        if self.installed.is_empty() {
            return taken;
        }
        format!("{taken} (installed: {})", self.installed.join(", "))
    }

    /// The compiler.
    #[must_use]
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// A cargo subcommand that works on the BPF target, in a target folder of its own.
    ///
    /// Its own folder, because two compilers in one folder rebuild each other's work.
    pub fn cargo(&self, subcommand: &str, target_dir: &Path, more_flags: &[&str]) -> Cmd {
        let mut flags = vec![
            // v3: 32-bit arithmetic and atomics that return a value; Linux 5.12.
            "-Ctarget-cpu=v3".to_owned(),
            format!("-Clinker={}", self.linker.display()),
            "-Clink-arg=--btf".to_owned(),
            // Without it a zeroed struct becomes a call of a byte loop: 20 to 55 ns a packet.
            "-Clink-arg=--disable-expand-memcpy-in-order".to_owned(),
            "-Cdebuginfo=2".to_owned(),
            format!("--cfg=bpf_target_arch=\"{}\"", std::env::consts::ARCH),
        ];
        flags.extend(more_flags.iter().map(|&flag| flag.to_owned()));
        self.compiler
            .cargo()
            .arg(subcommand)
            .args(self.compiler.build_std())
            .args(["--target", TARGET, "--target-dir"])
            .arg(target_dir)
            // What measures the tests of the host is not for programs of the kernel.
            .without_env("RUSTC_WORKSPACE_WRAPPER")
            .without_env("RUSTC_WRAPPER")
            // Encoded: a linker's path may hold spaces.
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
    }
}

/// The nightlies of rustup that have `rust-src`, ours first.
fn nightlies() -> Vec<Compiler> {
    let Some(list) = Cmd::new("rustup").args(["toolchain", "list"]).try_read() else { return Vec::new() };
    let mut names = nightly_names(&list);
    names.sort_by_key(|name| !name.starts_with(NIGHTLY));
    names.retain(|name| {
        let sysroot = Cmd::new("rustup").args(["run", name, "rustc", "--print", "sysroot"]).try_read();
        sysroot.is_some_and(|root| Path::new(root.trim()).join("lib/rustlib/src/rust/library/core").is_dir())
    });
    names.into_iter().map(Compiler::Nightly).collect()
}

fn nightly_names(list: &str) -> Vec<String> {
    let names = list.lines().filter_map(|line| line.split_whitespace().next());
    names.filter(|name| name.starts_with("nightly")).map(str::to_owned).collect()
}

fn llvm_of(version: &str) -> Option<u32> {
    let line = version.lines().find_map(|line| line.strip_prefix("LLVM version: "))?;
    line.split('.').next()?.parse().ok()
}

fn install_distribution() -> Result<Compiler> {
    if !apt::exists() {
        bail!("no apt-get here, so no distribution rustc with a BPF core");
    }
    apt::update()?;
    if let Some(missing) = PACKAGES.into_iter().find(|package| !apt::offers(package)) {
        bail!("this distribution has no package {missing}");
    }
    apt::install(&PACKAGES)?;
    Compiler::distribution().context("the packages did not bring a core for BPF")
}

fn install_nightly() -> Result<Compiler> {
    if exec::which("rustup").is_none() {
        bail!("no rustup here; see https://rustup.rs");
    }
    log::step(format_args!("rustup toolchain install {NIGHTLY} with rust-src"));
    Cmd::new("rustup")
        .args([
            "toolchain",
            "install",
            NIGHTLY,
            "--profile",
            "minimal",
            "--component",
            "rust-src",
            "--no-self-update",
        ])
        .run_within(RUSTUP_LIMIT)?;
    nightlies().into_iter().next().context("rustup installed no nightly with rust-src")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_llvm_version_is_read_from_rustc() {
        assert_eq!(llvm_of("rustc 1.96.0\nhost: x86_64\nLLVM version: 22.1.8\n"), Some(22));
        assert_eq!(llvm_of("rustc 1.96.0\n"), None);
    }

    #[test]
    fn only_nightlies_count() {
        let list = "stable-x86_64-unknown-linux-gnu (active, default)\nnightly-2026-05-20-x86_64-unknown-linux-gnu\n";
        assert_eq!(nightly_names(list), ["nightly-2026-05-20-x86_64-unknown-linux-gnu"]);
    }
}
