//! Builds an image with buildah, which needs no daemon, in a storage of its own.

use std::path::Path;

use anyhow::{Result, ensure};
use fs_err as fs;

use crate::exec::Cmd;

/// Input and output of a build.
pub(super) struct Build<'a> {
    /// The Containerfile.
    pub file: &'a Path,
    /// The folder from which the Containerfile copies.
    pub context: &'a Path,
    /// Name and tag.
    pub reference: &'a str,
    /// `amd64` or `arm64`.
    pub architecture: &'a str,
    /// The commit.
    pub revision: &'a str,
    /// Time stamp of the image and all files in it, in seconds since 1970.
    pub time: u64,
    /// The folder of buildah's storage; it is removed at the end.
    pub storage: &'a Path,
    /// Path of the archive to write.
    pub archive: &'a Path,
}

/// Builds the image and its archive (Docker's layout, which docker, podman and containerd load), and returns the image's id.
pub(super) fn build(build: &Build<'_>) -> Result<String> {
    remove(build.storage)?;
    // buildah would add the image to an existing archive.
    if build.archive.exists() {
        fs::remove_file(build.archive)?;
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
            // The driver `vfs` works everywhere, also in containers.
            .args(["--storage-driver", "vfs"])
    };
    buildah()
        .args(["build", "--quiet", "--isolation", "chroot", "--timestamp", &build.time.to_string()])
        .args(["--arch", build.architecture])
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
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use serde_json::Value;

    use super::*;
    use crate::setup::{self, Need};

    /// Builds the project's Containerfile with a text file instead of the program, and returns the archive and the id.
    fn image(folder: &Path, age: Duration) -> (Vec<u8>, String) {
        let context = folder.join("context");
        fs::create_dir_all(context.join("share/man/man1")).unwrap();
        for name in ["ballast", "LICENSE", "agent.cdx.json", "share/man/man1/ballast.1"] {
            fs::write(context.join(name), name).unwrap();
            let file = fs::File::options().write(true).open(context.join(name)).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        }
        let archive = folder.join("image.tar");
        let id = build(&Build {
            file: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/Containerfile"),
            context: &context,
            reference: "localhost/ballast:test",
            architecture: "arm64",
            revision: "0123456",
            time: 1_700_000_000,
            storage: &folder.join("storage"),
            archive: &archive,
        });
        let id = id.unwrap();
        assert!(!folder.join("storage").exists());
        (fs::read(archive).unwrap(), id)
    }

    #[test]
    #[ignore = "needs root: cargo xtask test netns"]
    fn the_same_files_give_the_same_image_at_any_time_and_place() {
        setup::tools(Need::Image).unwrap();
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (archive, id) = image(one.path(), Duration::ZERO);
        let (again, same) = image(other.path(), Duration::from_hours(1));
        assert_eq!(id, same);
        assert!(archive == again, "the archives differ");
        let read = |name: &str| {
            let tar = Cmd::new("tar").arg("-xOf").arg(one.path().join("image.tar")).arg(name);
            serde_json::from_str::<Value>(&tar.read().unwrap()).unwrap()
        };
        let manifest = read("manifest.json");
        assert_eq!(manifest[0]["RepoTags"][0], "localhost/ballast:test");
        let config = manifest[0]["Config"].as_str().unwrap();
        assert_eq!(format!("sha256:{}", config.trim_end_matches(".json")), id);
        let image = read(config);
        assert_eq!(image["architecture"], "arm64", "whatever this machine is");
        let config = &image["config"];
        assert_eq!(config["Entrypoint"][0], "/usr/bin/ballast");
        assert_eq!(config["Cmd"][0], "run");
        assert_eq!(config["Labels"]["org.opencontainers.image.revision"], "0123456");
    }
}
