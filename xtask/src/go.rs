//! Finds a Go that can build the API server, or installs one with apt and Go's module proxy.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use fs_err as fs;
use serde::Deserialize;

use crate::exec::{self, Cmd};
use crate::{apt, log};

/// The release of Go that `xtask/tools/*/go.mod` require.
const VERSION: &str = "1.26.0";
/// Since this version, Go itself downloads the release that a go.mod requires.
const FETCHES_ITSELF: (u32, u32) = (1, 21);

/// Returns a `go` that can build our tools; installs one if needed.
pub fn find_or_install() -> Result<PathBuf> {
    let best = || candidates().filter_map(|go| Some((version(&go)?, go))).max();
    let found = match best() {
        None if apt::exists() => {
            apt::install(&["golang-go"])?;
            best()
        }
        found => found,
    };
    let Some((version, go)) = found else {
        bail!("no `go` here: install Go {VERSION} or newer");
    };
    if version >= FETCHES_ITSELF { Ok(go) } else { fetch_release(&go) }
}

fn candidates() -> impl Iterator<Item = PathBuf> {
    exec::which("go").into_iter().chain([PathBuf::from("/usr/local/go/bin/go")])
}

fn version(go: &Path) -> Option<(u32, u32)> {
    // The installed release, not one to which a go.mod in a parent folder would switch.
    parse(&Cmd::new(go).arg("version").env("GOTOOLCHAIN", "local").without_env("GOROOT").dir("/").try_read()?)
}

fn parse(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().nth(2)?.strip_prefix("go")?.split('.');
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

/// Downloads the release as a module: an old Go can fetch a newer one from the module proxy, and verifies its checksum.
fn fetch_release(old: &Path) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Module {
        #[serde(rename = "Dir")]
        dir: PathBuf,
    }
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let module = format!("golang.org/toolchain@v0.0.1-go{VERSION}.linux-{arch}");
    log::step(format_args!("{} is too old: fetch Go {VERSION} as a module", old.display()));
    let output = Cmd::new(old).args(["mod", "download", "-json", &module]).dir("/").read()?;
    let module: Module =
        serde_json::from_str(&output).context("`go mod download` printed something unexpected")?;
    // Modules contain no file modes, so their programs are not executable.
    for folder in ["bin", "pkg/tool"] {
        make_runnable(&module.dir.join(folder))?;
    }
    Ok(module.dir.join("bin/go"))
}

fn make_runnable(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            make_runnable(&path)?;
        } else {
            fs::set_permissions(&path, Permissions::from_mode(0o755))?;
        }
    }
    Ok(())
}
