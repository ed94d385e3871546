//! `cargo xtask image`: the container image of `deploy/Containerfile`, by buildah.
//!
//! The same commit, compiler and C library give the same image: no clock and no path of this machine goes into it.

pub mod binary;
mod buildah;
mod commit;
mod sbom;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::cross::Arch;
use crate::package::share;
use crate::setup::{self, Need};
use crate::workspace::Workspace;
use crate::{build, log};
use commit::{revision, source_date};

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

/// What was made.
#[derive(Clone, Debug)]
pub struct Image {
    /// The archive.
    pub archive: PathBuf,
    /// The agent that is in it: static, so it runs on any node outside of a container, too.
    pub binary: PathBuf,
    /// The bills of materials, none for an image for tests; the image holds the same files.
    pub sboms: Vec<PathBuf>,
    /// Name and tag, as in a pod.
    pub reference: String,
    /// The image's id: the digest of its configuration, `sha256:` and 64 digits. Equal images have equal ones.
    pub id: String,
}

/// What the chart asks for unless told otherwise.
const NAME: &str = "localhost/ballast";
/// Texts that must go with the binary.
const LICENCES: [&str; 3] = ["LICENSE", "proxy-ebpf/LICENSE-GPL2", "proxy-ebpf/LICENSE-MIT"];

impl Args {
    /// The image that the chart asks for, in a folder of its own.
    #[must_use]
    pub fn into_folder(output: PathBuf, dev: bool) -> Self {
        Self { name: NAME.to_owned(), target: Arch::HOST, output: Some(output), dev }
    }
}

/// Bytes that the files of a released image may have together.
const MOST: u64 = 25_000_000;

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let image = make(&Workspace::find()?, args)?;
    log::line(format_args!("{} {}", image.reference, image.id));
    log::line(image.archive.display());
    image.sboms.iter().for_each(|sbom| log::line(sbom.display()));
    Ok(())
}

/// Builds the binary and puts the image around it.
pub fn make(workspace: &Workspace, args: &Args) -> Result<Image> {
    setup::tools(Need::Image)?;
    build::bpf(workspace, &build::Args::default())?;
    let binary = binary::build(workspace, args.target, args.dev)?;
    // The program writes its manual pages itself: one that runs here.
    let writer = if args.target == Arch::HOST {
        binary.clone()
    } else {
        build::agent(workspace, &build::Args::default())?
    };
    log::timed("put the image together", || pack(workspace, args, &binary, &writer))
}

/// What `deploy/Containerfile` copies, and the image that buildah makes of it: no daemon, no container is run. `writer`: the same
/// program for this machine.
fn pack(workspace: &Workspace, args: &Args, binary: &Path, writer: &Path) -> Result<Image> {
    let folder = args.output.clone().unwrap_or_else(|| workspace.target().join("image"));
    let context = folder.join("context");
    if context.exists() {
        fs::remove_dir_all(&context).with_context(|| format!("cannot remove {}", context.display()))?;
    }
    fs::create_dir_all(&context).with_context(|| format!("cannot make {}", context.display()))?;
    let root = workspace.root();
    // Modes are what they are in the image, whatever the checkout's are.
    let copy = |from: &Path, name: &str, mode: u32| {
        let to = context.join(name);
        let copied =
            fs::copy(from, &to).and_then(|_| fs::set_permissions(&to, fs::Permissions::from_mode(mode)));
        copied.with_context(|| format!("cannot copy {}", from.display()))
    };
    copy(binary, "ballast", 0o755)?;
    for licence in LICENCES {
        copy(&root.join(licence), licence.rsplit('/').next().unwrap_or(licence), 0o644)?;
    }
    share::write(writer, &context.join("share"))?;
    let stem = format!("ballast-{}-{}", env!("CARGO_PKG_VERSION"), args.target.debian());
    let mut sboms = Vec::new();
    if !args.dev {
        for (of, text) in sbom::bills(workspace)? {
            let path = folder.join(format!("{stem}.{of}.cdx.json"));
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
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

/// Bytes of all files in a folder and below.
fn size(folder: &Path) -> Result<u64> {
    let cannot = || format!("cannot list {}", folder.display());
    let mut sum = 0;
    for entry in fs::read_dir(folder).with_context(cannot)? {
        let entry = entry.with_context(cannot)?;
        let about = entry.metadata().with_context(cannot)?;
        sum += if about.is_dir() { size(&entry.path())? } else { about.len() };
    }
    Ok(sum)
}

/// Every node keeps the image, and pulls it before its Services work.
fn require_small(size: u64) -> Result<()> {
    ensure!(
        size <= MOST,
        "the image has {size} bytes unpacked, and may have {MOST}: `nm --size-sort` of ballast.debug shows what is large"
    );
    Ok(())
}

/// The name with a tag: what follows the last slash has a colon, or gets one.
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
        require_small(MOST).unwrap();
        let error = require_small(MOST + 1).unwrap_err().to_string();
        assert!(error.contains("25000001 bytes"), "{error}");
    }

    #[test]
    fn a_name_without_tag_gets_the_version() {
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(reference("localhost/ballast"), format!("localhost/ballast:{version}"));
        assert_eq!(reference("a.test:5000/ballast"), format!("a.test:5000/ballast:{version}"));
        assert_eq!(reference("a.test:5000/ballast:main"), "a.test:5000/ballast:main");
    }
}
