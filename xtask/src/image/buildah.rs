//! buildah: builds an image without a daemon, in a storage of its own.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::exec::Cmd;

/// What is built, and from what.
pub(super) struct Build<'a> {
    /// The Containerfile.
    pub file: &'a Path,
    /// The folder that it copies from.
    pub context: &'a Path,
    /// Name and tag.
    pub reference: &'a str,
    /// The commit.
    pub revision: &'a str,
    /// Of the image and all files in it, in seconds since 1970.
    pub time: u64,
    /// A folder for buildah; it is removed at the end.
    pub storage: &'a Path,
    /// Where the archive goes.
    pub archive: &'a Path,
}

/// Builds the image and its archive (Docker's layout: what `docker load` takes, everybody takes), and returns its id.
pub(super) fn build(build: &Build<'_>) -> Result<String> {
    remove(build.storage)?;
    // It adds to an archive that is there.
    if build.archive.exists() {
        fs::remove_file(build.archive)
            .with_context(|| format!("cannot remove {}", build.archive.display()))?;
    }
    let made = in_storage(build);
    remove(build.storage)?;
    made
}

fn in_storage(build: &Build<'_>) -> Result<String> {
    let buildah = || {
        Cmd::new("buildah")
            .arg("--root")
            .arg(build.storage.join("root"))
            .arg("--runroot")
            .arg(build.storage.join("run"))
            // The driver that works everywhere, containers included.
            .args(["--storage-driver", "vfs"])
    };
    buildah()
        .args(["build", "--quiet", "--isolation", "chroot", "--timestamp", &build.time.to_string()])
        .args(["--build-arg", &format!("VERSION={}", env!("CARGO_PKG_VERSION"))])
        .args(["--build-arg", &format!("REVISION={}", build.revision)])
        .args(["--tag", build.reference, "--file"])
        .arg(build.file)
        .arg(build.context)
        .read()?;
    let destination = format!("docker-archive:{}:{}", build.archive.display(), build.reference);
    buildah().args(["push", "--quiet", build.reference, &destination]).read()?;
    let id = buildah()
        .args(["inspect", "--type", "image", "--format", "{{.FromImageID}}", build.reference])
        .read()?;
    let id = id.trim();
    ensure!(id.len() == 64, "buildah names the image {id:?}");
    Ok(format!("sha256:{id}"))
}

fn remove(storage: &Path) -> Result<()> {
    match fs::remove_dir_all(storage) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", storage.display()))
        }
        _ => Ok(()),
    }
}
