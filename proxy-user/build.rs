//! Puts the BPF object where `include_bytes!` finds it: `$OUT_DIR/ballast.bpf.o`.
//!
//! `cargo xtask build` makes the object. Without one the file is empty, so that clippy and an editor still work.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

const NAME: &str = "ballast.bpf.o";

fn main() -> io::Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    let object = env::var_os("BALLAST_BPF_OBJECT").map_or_else(|| default_object(&out), PathBuf::from);
    println!("cargo:rerun-if-env-changed=BALLAST_BPF_OBJECT");
    println!("cargo:rerun-if-changed=build.rs");
    if object.exists() {
        println!("cargo:rerun-if-changed={}", object.display());
        fs::copy(&object, out.join(NAME))?;
        return Ok(());
    }
    println!("cargo:warning=no BPF object at {}: `cargo xtask build` makes it", object.display());
    // A missing file would mean a new run each time; its folder changes when the file appears.
    if let Some(folder) = object.parent() {
        fs::create_dir_all(folder)?;
        println!("cargo:rerun-if-changed={}", folder.display());
    }
    fs::write(out.join(NAME), [])
}

/// `bpf/ballast.bpf.o` in cargo's target folder, which is the one above `OUT_DIR` that has cargo's mark.
fn default_object(out: &Path) -> PathBuf {
    let target = out
        .ancestors()
        .find(|dir| dir.join(".rustc_info.json").exists() || dir.join("CACHEDIR.TAG").exists());
    target.unwrap_or(out).join("bpf").join(NAME)
}
