//! `cargo xtask image`: builds the container image of `deploy/Containerfile` with buildah.
//!
//! The same commit, compiler and C library give the same image, which contains neither build times nor paths of a machine.

pub mod binary;
mod buildah;
mod sbom;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use fs_err as fs;

use crate::cross::Arch;
use crate::package::write_share;
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, log};
use sbom::{revision, source_date};

/// Build the container image: one static binary in an archive that `ctr image import`, `docker load`, `podman load`
/// and `kind load image-archive` read, and its bills of materials (`CycloneDX`). Uses buildah, as root or as a user with subordinate ids (`/etc/subuid`).
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Name of the image; the tag is the version unless the name has one. Uses no registry
    #[arg(long, default_value = NAME)]
    pub name: String,
    /// The architecture of the image
    #[arg(long, value_enum, default_value_t)]
    pub target: Arch,
    /// Folder for the archive and the bill of materials [default: target/image]
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Build the agent without optimisations and without bills of materials, for tests of the image
    #[arg(long)]
    pub dev: bool,
}

/// An image that was built.
#[derive(Clone, Debug)]
pub struct Image {
    /// Path of the archive.
    pub archive: PathBuf,
    /// Path of the agent in the image: a static binary, which also runs on any node outside of a container.
    pub binary: PathBuf,
    /// Paths of the bills of materials, which the image also contains; none for a test image.
    pub sboms: Vec<PathBuf>,
    /// Name and tag, as in the manifest of a pod.
    pub reference: String,
    /// The image's id: the digest of its configuration, `sha256:` and 64 digits. Equal images have equal ids.
    pub id: String,
}

/// The default name of the image in the chart.
const NAME: &str = "localhost/ballast";
/// Licence texts that must accompany the binary.
const LICENCES: [&str; 3] = ["LICENSE", "proxy-ebpf/LICENSE-GPL2", "proxy-ebpf/LICENSE-MIT"];

impl Args {
    /// Returns the arguments for an image with the chart's default name, in the folder `output`.
    pub fn into_folder(output: PathBuf, dev: bool) -> Self {
        Self { name: NAME.to_owned(), target: Arch::HOST, output: Some(output), dev }
    }
}

/// Maximum size of all files of a released image together, in bytes.
const MAX_UNPACKED_BYTES: u64 = 25_000_000;

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let image = make(&Workspace::find()?, args)?;
    log::line(format_args!("{} {}", image.reference, image.id));
    log::line(image.archive.display());
    image.sboms.iter().for_each(|sbom| log::line(sbom.display()));
    Ok(())
}

/// Builds the binary, and the image that contains it.
pub fn make(workspace: &Workspace, args: &Args) -> Result<Image> {
    setup::tools(Need::Image)?;
    build::bpf(workspace, &build::Args::default())?;
    let binary = binary::build(workspace, args.target, args.dev)?;
    // The program writes its manual pages itself, so `writer` must run on this machine.
    let writer = if args.target == Arch::HOST {
        binary.clone()
    } else {
        build::agent(workspace, &build::Args::default())?
    };
    log::timed("put the image together", || pack(workspace, args, &binary, &writer))
}

/// Collects the files that `deploy/Containerfile` copies, and builds the image with buildah, without a daemon and without
/// running a container. `writer` is the same program, built for this machine.
fn pack(workspace: &Workspace, args: &Args, binary: &Path, writer: &Path) -> Result<Image> {
    let folder = args.output.clone().unwrap_or_else(|| workspace.target().join("image"));
    let context = folder.join("context");
    if context.exists() {
        fs::remove_dir_all(&context)?;
    }
    fs::create_dir_all(&context)?;
    let root = workspace.root();
    // Sets the modes that files have in the image, independently of the modes in the checkout.
    let copy = |from: &Path, name: &str, mode: u32| {
        let to = context.join(name);
        fs::copy(from, &to).and_then(|_| fs::set_permissions(&to, Permissions::from_mode(mode)))
    };
    copy(binary, "ballast", 0o755)?;
    for licence in LICENCES {
        copy(&root.join(licence), licence.rsplit('/').next().unwrap_or(licence), 0o644)?;
    }
    write_share(writer, &context.join("share"))?;
    let stem = format!("ballast-{}-{}", env!("CARGO_PKG_VERSION"), args.target.debian());
    let mut sboms = Vec::new();
    if !args.dev {
        for (of, text) in sbom::bills(workspace)? {
            let path = folder.join(format!("{stem}.{of}.cdx.json"));
            fs::write(&path, text)?;
            copy(&path, &format!("{of}.cdx.json"), 0o644)?;
            sboms.push(path);
        }
    }
    let size = size(&context)?;
    log::line(format_args!("    {}.{} MB unpacked", size / 1_000_000, size / 100_000 % 10));
    if !args.dev {
        require_small(size)?;
    }
    let reference = reference(&args.name);
    let archive = folder.join(format!("{stem}.tar"));
    let id = buildah::build(&buildah::Build {
        file: &root.join("deploy/Containerfile"),
        context: &context,
        reference: &reference,
        architecture: args.target.debian(),
        revision: revision(workspace).as_deref().unwrap_or("unknown"),
        time: source_date(workspace),
        storage: &folder.join("storage"),
        archive: &archive,
    })?;
    Ok(Image { binary: binary.to_owned(), archive, sboms, reference, id })
}

/// Returns the size of all files in a folder and its subfolders, in bytes.
fn size(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        sum += if about.is_dir() { size(&entry.path())? } else { about.len() };
    }
    Ok(sum)
}

/// Returns an error if the image is too large: every node stores the image, and pulls it before its Services work.
fn require_small(size: u64) -> Result<()> {
    ensure!(
        size <= MAX_UNPACKED_BYTES,
        "the image has {size} bytes unpacked, and may have {MAX_UNPACKED_BYTES}: `nm --size-sort` of ballast.debug shows what is large"
    );
    Ok(())
}

/// Returns the name with a tag: the version is added unless the part after the last slash has a tag.
fn reference(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}:{}", env!("CARGO_PKG_VERSION")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_the_size_of_its_files_and_a_large_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("share")).unwrap();
        fs::write(folder.path().join("ballast"), [0; 70]).unwrap();
        fs::write(folder.path().join("share/ballast.1"), [0; 7]).unwrap();
        assert_eq!(size(folder.path()).unwrap(), 77);
        require_small(MAX_UNPACKED_BYTES).unwrap();
        let error = require_small(MAX_UNPACKED_BYTES + 1).unwrap_err().to_string();
        assert!(error.contains("25000001 bytes"), "{error}");
    }
}
