//! An OCI image layout in one tar file (image-spec 1.1), with the `manifest.json` that older `docker load` reads.
//!
//! ```text
//! oci-layout            that this is a layout, and its version
//! index.json            -> the manifest, and the image's name
//! manifest.json         the same for older tools
//! blobs/sha256/<digest> manifest, configuration, layer
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Context as _, Result};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// A file of the image.
#[derive(Clone, Debug)]
pub(super) struct File {
    /// From the root, without a slash in front.
    pub path: String,
    /// Permissions, such as `0o755`.
    pub mode: u32,
    pub content: Vec<u8>,
}

/// What the image says of itself.
#[derive(Clone, Debug)]
pub(super) struct About {
    /// Name and tag.
    pub reference: String,
    pub version: String,
    /// The commit.
    pub revision: Option<String>,
    pub entrypoint: String,
    /// Seconds since 1970.
    pub time: u64,
}

/// The archive and the digest of the manifest in it.
#[derive(Clone, Debug)]
pub(super) struct Archive {
    pub bytes: Vec<u8>,
    pub digest: String,
}

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// This machine's architecture by Go's name for it.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Puts the archive together.
pub(super) fn archive(about: &About, files: &[File]) -> Result<Archive> {
    let plain = tar(files, about.time)?;
    // No name and no time in the header.
    let mut gzip = GzBuilder::new().write(Vec::new(), Compression::best());
    gzip.write_all(&plain).context("cannot compress the layer")?;
    let layer = gzip.finish().context("cannot compress the layer")?;
    let config = document(&config(about, &sha256(&plain)))?;
    let manifest = document(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor(CONFIG, &config),
        "layers": [descriptor(LAYER, &layer)],
        "annotations": annotations(about),
    }))?;
    let mut entry = descriptor(MANIFEST, &manifest);
    entry["platform"] = json!({ "architecture": architecture(), "os": "linux" });
    entry["annotations"] = json!({
        // containerd and docker go by the first, podman and skopeo by the second.
        "io.containerd.image.name": about.reference,
        "org.opencontainers.image.ref.name": about.reference.rsplit(':').next(),
    });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] });
    let old = json!([{
        "Config": blob(&config),
        "RepoTags": [about.reference],
        "Layers": [blob(&layer)],
    }]);
    let digest = sha256(&manifest);
    let mut parts = vec![
        ("oci-layout".to_owned(), document(&json!({ "imageLayoutVersion": "1.0.0" }))?),
        ("index.json".to_owned(), document(&index)?),
        ("manifest.json".to_owned(), document(&old)?),
    ];
    parts.extend([manifest, config, layer].map(|content| (blob(&content), content)));
    let parts: Vec<_> =
        parts.into_iter().map(|(path, content)| File { path, mode: 0o644, content }).collect();
    Ok(Archive { bytes: tar(&parts, about.time)?, digest })
}

fn config(about: &About, layer: &str) -> Value {
    json!({
        "created": rfc3339(about.time),
        "architecture": architecture(),
        "os": "linux",
        "config": {
            "Entrypoint": [about.entrypoint],
            "Cmd": ["run"],
            "Env": ["PATH=/usr/bin"],
            "Labels": annotations(about),
        },
        "rootfs": { "type": "layers", "diff_ids": [layer] },
        "history": [{ "created": rfc3339(about.time), "created_by": "cargo xtask image" }],
    })
}

/// The names are of image-spec's `annotations.md`.
fn annotations(about: &About) -> BTreeMap<String, String> {
    let mut all = BTreeMap::from([
        ("title", "ballast".to_owned()),
        ("description", "A kube-proxy replacement on eBPF".to_owned()),
        ("licenses", "Apache-2.0".to_owned()),
        ("created", rfc3339(about.time)),
        ("version", about.version.clone()),
    ]);
    all.extend(about.revision.clone().map(|revision| ("revision", revision)));
    all.into_iter().map(|(name, value)| (format!("org.opencontainers.image.{name}"), value)).collect()
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": sha256(content), "size": content.len() })
}

/// JSON with sorted keys.
fn document(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec(value).context("cannot write a document of the image")
}

/// The digest as image-spec writes it.
pub(super) fn sha256(content: &[u8]) -> String {
    let mut text = "sha256:".to_owned();
    for byte in Sha256::digest(content) {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn blob(content: &[u8]) -> String {
    format!("blobs/{}", sha256(content).replace(':', "/"))
}

/// A tar file with the folders that the files lie in; everything is root's.
fn tar(files: &[File], time: u64) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for folder in folders(files) {
        let header = header(tar::EntryType::Directory, 0o755, 0, time);
        append(&mut tar, header, &format!("{folder}/"), &[])?;
    }
    for file in files {
        let header = header(tar::EntryType::Regular, file.mode, file.content.len() as u64, time);
        append(&mut tar, header, &file.path, &file.content)?;
    }
    tar.into_inner().context("cannot end a tar file")
}

fn append(
    tar: &mut tar::Builder<Vec<u8>>,
    mut header: tar::Header,
    path: &str,
    content: &[u8],
) -> Result<()> {
    tar.append_data(&mut header, path, content).with_context(|| format!("cannot put {path} into a tar file"))
}

fn header(kind: tar::EntryType, mode: u32, size: u64, time: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(time);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Every folder above a file, the outer ones first.
fn folders(files: &[File]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for file in files {
        all.extend(file.path.match_indices('/').map(|(at, _)| file.path[..at].to_owned()));
    }
    all
}

/// Seconds since 1970 as `2026-01-31T23:59:59Z`.
pub(super) fn rfc3339(time: u64) -> String {
    // Beyond the year 9999 there is no such text.
    let time = i64::try_from(time).ok().and_then(|time| jiff::Timestamp::from_second(time).ok());
    time.unwrap_or(jiff::Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
mod tests;
