//! Finds a `bpf-linker` whose LLVM is new enough, or builds one.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::exec::{self, Cmd};
use crate::{apt, log, workspace};

const VERSION: &str = "0.13.0";

/// Returns a linker that can read the output of a rustc with this LLVM: from our cache, cargo's `bin` folder or `PATH`.
pub fn find(llvm: u32) -> Result<Option<PathBuf>> {
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let candidates = [
        Some(root(llvm)?.join("bin/bpf-linker")),
        cargo_home.map(|home| home.join("bin/bpf-linker")),
        exec::which("bpf-linker"),
    ];
    Ok(candidates.into_iter().flatten().find(|linker| fits(linker, llvm)))
}

/// Builds a linker against the machine's LLVM of this major version, and installs it into our cache.
pub fn install(llvm: u32) -> Result<PathBuf> {
    let prefix = match llvm_prefix(llvm) {
        Some(prefix) => prefix,
        None => install_llvm(llvm)?,
    };
    let root = root(llvm)?;
    log::step(format_args!("cargo install bpf-linker {VERSION} for LLVM {llvm} (about a minute)"));
    Cmd::cargo()
        .args(["install", "bpf-linker", "--quiet", "--force", "--version", VERSION, "--no-default-features"])
        .args(["--features", &format!("llvm-{llvm}"), "--root"])
        .arg(&root)
        .env("LLVM_PREFIX", &prefix)
        .env("LIBRARY_PATH", prefix.join("lib"))
        .without_env("CARGO_TARGET_DIR")
        .run()?;
    find(llvm)?.context("the new bpf-linker does not start")
}

fn root(llvm: u32) -> Result<PathBuf> {
    Ok(workspace::cache()?.join(format!("bpf-linker-{VERSION}-llvm-{llvm}")))
}

fn fits(linker: &Path, llvm: u32) -> bool {
    let Ok(file) = fs_err::read(linker) else { return false };
    // A linker with a statically linked LLVM does not show its version: the first link shows whether it is new enough.
    linked_llvm(&file).is_none_or(|own| own >= llvm) && Cmd::new(linker).arg("--version").succeeds()
}

/// Returns the major version in the name of the LLVM library that a program links to; `None` if it links to none.
fn linked_llvm(file: &[u8]) -> Option<u32> {
    ["libLLVM.so.", "libLLVM-"].into_iter().find_map(|stem| {
        let start = file.windows(stem.len()).position(|window| window == stem.as_bytes())? + stem.len();
        let digits = file[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        std::str::from_utf8(&file[start..start + digits]).ok()?.parse().ok()
    })
}

fn llvm_prefix(llvm: u32) -> Option<PathBuf> {
    let debian = PathBuf::from(format!("/usr/lib/llvm-{llvm}"));
    if debian.join("include/llvm-c/Core.h").exists() && debian.join("lib/libPolly.a").exists() {
        return Some(debian);
    }
    if apt::exists() {
        // Debian splits LLVM into packages; some of them alone are not enough to link with.
        return None;
    }
    [format!("llvm-config-{llvm}"), "llvm-config".to_owned()].into_iter().find_map(|config| {
        let version = Cmd::new(&config).arg("--version").try_read()?;
        let fits = version.split('.').next()? == llvm.to_string();
        let prefix = Cmd::new(&config).arg("--prefix").try_read()?;
        fits.then(|| PathBuf::from(prefix.trim()))
    })
}

fn install_llvm(llvm: u32) -> Result<PathBuf> {
    let (dev, polly) = (format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev"));
    if !apt::exists() {
        bail!("bpf-linker needs LLVM {llvm} with its headers (llvm-config-{llvm})");
    }
    apt::update()?;
    if !apt::offers(&dev) {
        bail!(
            "bpf-linker needs {dev}, which apt does not offer: add a source that has it, such as LLVM's own"
        );
    }
    apt::install(&[&dev, &polly, "zlib1g-dev", "libzstd-dev"])?;
    llvm_prefix(llvm).with_context(|| format!("{dev} did not bring LLVM to /usr/lib/llvm-{llvm}"))
}
