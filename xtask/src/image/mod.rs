//! `cargo xtask image`: the container image as an OCI archive, made without a container engine.
//!
//! The same commit, compiler and C library give the same bytes: no clock, no path of this machine and no order of
//! a folder goes into them.

mod binary;
mod oci;
mod sbom;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::exec::Cmd;
use crate::workspace::Workspace;
use crate::{build, say};

/// Build the container image: one static binary in an OCI archive that `ctr image import`, `docker load`, `podman
/// load` and `kind load image-archive` read, and its bill of materials (`CycloneDX`).
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Name of the image; the tag is the version unless the name has one. No registry is asked
    #[arg(long, default_value = NAME)]
    pub name: String,
    /// Folder for the archive and the bill of materials [default: target/image]
    #[arg(long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Build the agent without optimisations: for tests of the image
    #[arg(long)]
    pub dev: bool,
}

/// What was made.
#[derive(Clone, Debug)]
pub struct Image {
    /// The OCI archive.
    pub archive: PathBuf,
    /// The agent that is in it: static, so it runs on any node outside of a container, too.
    pub binary: PathBuf,
    /// The bill of materials; the image holds the same file.
    pub sbom: PathBuf,
    /// Name and tag, as in a pod.
    pub reference: String,
    /// Digest of the image's manifest: `sha256:` and 64 digits.
    pub digest: String,
}

/// What the chart asks for unless told otherwise.
const NAME: &str = "localhost/ballast";
/// Where the image keeps its files.
const BINARY: &str = "usr/bin/ballast";
const DOCUMENTS: &str = "usr/share/doc/ballast";
/// Texts that must go with the binary.
const LICENCES: [&str; 3] = ["LICENSE", "proxy-ebpf/LICENSE-GPL2", "proxy-ebpf/LICENSE-MIT"];

impl Args {
    /// The image that the chart asks for, in a folder of its own.
    #[must_use]
    pub fn into_folder(output: PathBuf, dev: bool) -> Self {
        Self { name: NAME.to_owned(), output: Some(output), dev }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<()> {
    let image = make(&Workspace::find()?, args)?;
    say::line(format_args!("{} {}", image.reference, image.digest));
    say::line(image.archive.display());
    say::line(image.sbom.display());
    Ok(())
}

/// Builds the binary and puts the image around it.
pub fn make(workspace: &Workspace, args: &Args) -> Result<Image> {
    build::bpf(workspace, &build::Args::default())?;
    let binary = binary::build(workspace, args.dev)?;
    say::timed("put the image together", || pack(workspace, args, &binary))
}

fn pack(workspace: &Workspace, args: &Args, binary: &Path) -> Result<Image> {
    let time = source_date(workspace);
    let bill = sbom::bill(workspace, time)?;
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut files = vec![
        oci::File { path: BINARY.into(), mode: 0o755, content: read(binary)? },
        oci::File { path: format!("{DOCUMENTS}/sbom.cdx.json"), mode: 0o644, content: bill.clone() },
    ];
    for licence in LICENCES {
        let path = workspace.root().join(licence);
        let name = licence.rsplit('/').next().unwrap_or(licence);
        files.push(oci::File { path: format!("{DOCUMENTS}/{name}"), mode: 0o644, content: read(&path)? });
    }
    let reference = reference(&args.name);
    let about = oci::About {
        reference: reference.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        revision: revision(workspace),
        entrypoint: format!("/{BINARY}"),
        time,
    };
    let made = oci::archive(&about, &files)?;
    let folder = args.output.clone().unwrap_or_else(|| workspace.target().join("image"));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let stem = format!("ballast-{}-{}", about.version, oci::architecture());
    let write = |name: String, content: &[u8]| -> Result<PathBuf> {
        let path = folder.join(name);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    Ok(Image {
        binary: binary.to_owned(),
        archive: write(format!("{stem}.tar"), &made.bytes)?,
        sbom: write(format!("{stem}.cdx.json"), &bill)?,
        reference,
        digest: made.digest,
    })
}

/// The name with a tag: what follows the last slash has a colon, or gets one.
fn reference(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}:{}", env!("CARGO_PKG_VERSION")) }
}

/// The time that files and documents carry, in seconds since 1970: `$SOURCE_DATE_EPOCH`, or the last commit's.
fn source_date(workspace: &Workspace) -> u64 {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let committed = || git(workspace, &["log", "-1", "--format=%ct"]);
    given.or_else(committed).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// The commit, if this is a checkout.
fn revision(workspace: &Workspace) -> Option<String> {
    git(workspace, &["rev-parse", "HEAD"]).map(|text| text.trim().to_owned())
}

fn git(workspace: &Workspace, args: &[&str]) -> Option<String> {
    Cmd::new("git").args(args).dir(workspace.root()).try_read()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_tag_gets_the_version() {
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(reference("localhost/ballast"), format!("localhost/ballast:{version}"));
        assert_eq!(reference("a.test:5000/ballast"), format!("a.test:5000/ballast:{version}"));
        assert_eq!(reference("a.test:5000/ballast:main"), "a.test:5000/ballast:main");
    }
}
