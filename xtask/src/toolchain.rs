//! The toolchain of the BPF programs: a rustc that has `core` for the BPF target, and a linker.
//!
//! Two kinds of rustc are usable: a rustup nightly with `rust-src`, which builds `core` itself, and a distribution's rustc
//! with a prebuilt `core`. The linker's LLVM must be at least as new as the LLVM of rustc.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::exec::{self, Cmd};
use crate::{apt, linker, log};

/// The nightly to install. It is pinned, because the linker cannot link the output of an LLVM newer than its own.
const NIGHTLY: &str = "nightly-2026-05-20";
/// The distribution's compiler, as an absolute path because rustup's usually comes first in `PATH`.
const DISTRIBUTION: &str = "/usr/bin/rustc";
/// Debian's rustc that follows upstream, and its `core` for BPF.
const PACKAGES: [&str; 2] = ["rustc-web", "libstd-rust-web-dev-bpf"];
/// Time limit of rustup: enough for 200 MB over a slow connection, short enough for users who wait on a blocked one.
const RUSTUP_LIMIT: &str = "5m";

/// The BPF target with this machine's byte order.
pub const TARGET: &str =
    if cfg!(target_endian = "big") { "bpfeb-unknown-none" } else { "bpfel-unknown-none" };

/// A rustc that has, or can build, `core` for [`TARGET`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// A rustup toolchain with `rust-src`, by its rustup name.
    Nightly(String),
    /// A rustc with a prebuilt `core`, by its path.
    Distribution(PathBuf),
}

/// A compiler and a linker that is new enough for it.
#[derive(Clone, Debug)]
pub struct Toolchain {
    compiler: Compiler,
    linker: PathBuf,
}

impl Compiler {
    /// Returns every usable compiler that is installed, the preferred one first.
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
        let has_core = fs_err::read_dir(libdir).ok()?.flatten().any(|file| {
            let name = file.file_name();
            name.to_string_lossy().starts_with("libcore-")
        });
        has_core.then(|| Self::Distribution(DISTRIBUTION.into()))
    }

    /// Returns the major version of the compiler's LLVM, e.g. 22.
    fn llvm(&self) -> Result<u32> {
        let text = match self {
            Self::Nightly(name) => Cmd::new("rustup").args(["run", name, "rustc", "-vV"]),
            Self::Distribution(rustc) => Cmd::new(rustc).arg("-vV"),
        };
        llvm_of(&text.without_env("LD_LIBRARY_PATH").read()?)
            .ok_or_else(|| anyhow!("{self} does not print its LLVM version"))
    }

    /// Returns a call of a cargo that uses this compiler.
    fn cargo(&self) -> Cmd {
        let cargo = match self {
            // `rustup run` selects the toolchain; variables of the cargo that runs this program would take precedence.
            Self::Nightly(name) => Cmd::new("rustup")
                .args(["run", name, "cargo"])
                .without_env("RUSTUP_TOOLCHAIN")
                .without_env("RUSTC")
                .without_env("CARGO"),
            // Allows the unstable parts of `core`, which are used on purpose: the target has no stable release.
            Self::Distribution(rustc) => Cmd::cargo().env("RUSTC", rustc).env("RUSTC_BOOTSTRAP", "1"),
        };
        // `LD_LIBRARY_PATH` names the libraries of the toolchain that runs this program, not of this compiler. Wrappers that
        // measure the coverage of host tests must not change the kernel's programs.
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
    /// Finds a compiler and a linker that is new enough for it, or installs them.
    pub fn setup() -> Result<Self> {
        let present = Compiler::present();
        for compiler in &present {
            let llvm = compiler.llvm()?;
            if let Some(linker) = linker::find(llvm)? {
                return Ok(Self { compiler: compiler.clone(), linker });
            }
        }
        let mut reasons = Vec::new();
        for compiler in present {
            match Self::with_new_linker(compiler) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => reasons.push(format!("{error:#}")),
            }
        }
        // First the distribution, which has the compiler and an LLVM that fits; a nightly is another download of 200 MB.
        for install in [install_distribution, install_nightly] {
            match install().and_then(Self::with_new_linker) {
                Ok(toolchain) => return Ok(toolchain),
                Err(error) => {
                    log::line(format_args!("    no: {error:#}"));
                    reasons.push(format!("{error:#}"));
                }
            }
        }
        bail!("no compiler for {TARGET}:\n  {}", reasons.join("\n  "))
    }

    fn with_new_linker(compiler: Compiler) -> Result<Self> {
        let llvm = compiler.llvm()?;
        let linker = linker::find(llvm)?.map_or_else(|| linker::install(llvm), Ok)?;
        Ok(Self { compiler, linker })
    }

    /// Describes the selected compiler and linker in one line.
    pub fn describe(&self) -> String {
        format!("BPF programs: {}, {}", self.compiler, self.linker.display())
    }

    /// Returns the compiler.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// Returns a call of a cargo subcommand for the BPF target, with a target folder of its own: two compilers that share a
    /// folder rebuild each other's output.
    pub fn cargo(&self, subcommand: &str, target_dir: &Path, more_flags: &[&str]) -> Cmd {
        let mut flags = vec![
            // v3 has 32-bit arithmetic, and atomics that return a value, which need Linux 5.12.
            "-Ctarget-cpu=v3".to_owned(),
            format!("-Clinker={}", self.linker.display()),
            "-Clink-arg=--btf".to_owned(),
            // Without this flag, zeroing a struct becomes a call of a byte loop: 20 to 55 ns per packet.
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
            // Encoded, because the linker's path may contain spaces.
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
    }
}

/// Returns rustup's nightlies that have `rust-src`, the pinned one first.
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
    Cmd::new("timeout")
        .args([
            RUSTUP_LIMIT,
            "rustup",
            "toolchain",
            "install",
            NIGHTLY,
            "--profile",
            "minimal",
            "--component",
            "rust-src",
            "--no-self-update",
        ])
        .run()?;
    nightlies().into_iter().next().context("rustup installed no nightly with rust-src")
}
