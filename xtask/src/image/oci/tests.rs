use std::collections::BTreeMap;
use std::io::Read as _;

use oci_spec::image::{Digest, ImageConfiguration, ImageIndex, ImageManifest, MediaType, OciLayout};

use super::*;

fn about() -> About {
    About {
        reference: "localhost/ballast:1.2.3".into(),
        version: "1.2.3".into(),
        revision: Some("abc".into()),
        entrypoint: "/usr/bin/ballast".into(),
        time: 1_700_000_000,
    }
}

fn files() -> Vec<File> {
    vec![
        File { path: "usr/bin/ballast".into(), mode: 0o755, content: b"program".to_vec() },
        File { path: "usr/share/doc/x".into(), mode: 0o644, content: vec![7; 100_000] },
    ]
}

/// The files of a tar file: mode and content.
fn unpacked(bytes: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
    let mut archive = tar::Archive::new(bytes);
    let mut found = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().to_str().unwrap().to_owned();
        assert_eq!((entry.header().uid().unwrap(), entry.header().gid().unwrap()), (0, 0));
        assert_eq!(entry.header().mtime().unwrap(), about().time);
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        assert!(found.insert(path.clone(), (entry.header().mode().unwrap(), content)).is_none(), "{path}");
    }
    found
}

/// The content of a blob, after checking its size and digest.
fn blob_of<'a>(
    parts: &'a BTreeMap<String, (u32, Vec<u8>)>,
    descriptor: &oci_spec::image::Descriptor,
) -> &'a [u8] {
    let digest: &Digest = descriptor.digest();
    let content = &parts[&format!("blobs/sha256/{}", digest.digest())].1;
    assert_eq!(sha256(content), digest.to_string());
    assert_eq!(content.len() as u64, descriptor.size());
    content
}

#[test]
fn the_archive_is_a_layout_from_the_index_to_the_files() {
    let made = archive(&about(), &files()).unwrap();
    let parts = unpacked(&made.bytes);
    let layout = OciLayout::from_reader(&*parts["oci-layout"].1).unwrap();
    assert_eq!(layout.image_layout_version(), "1.0.0");

    let index = ImageIndex::from_reader(&*parts["index.json"].1).unwrap();
    let [entry] = index.manifests().as_slice() else { panic!("one image") };
    assert_eq!(entry.media_type(), &MediaType::ImageManifest);
    assert_eq!(entry.digest().to_string(), made.digest);
    let named = &entry.annotations().as_ref().unwrap()["io.containerd.image.name"];
    assert_eq!(named, "localhost/ballast:1.2.3");

    let manifest = ImageManifest::from_reader(blob_of(&parts, entry)).unwrap();
    let config = ImageConfiguration::from_reader(blob_of(&parts, manifest.config())).unwrap();
    let [layer] = manifest.layers().as_slice() else { panic!("one layer") };
    assert_eq!(layer.media_type(), &MediaType::ImageLayerGzip);
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(blob_of(&parts, layer)).read_to_end(&mut plain).unwrap();
    assert_eq!(config.rootfs().diff_ids(), &[sha256(&plain)]);
    assert_eq!(config.created().as_deref(), Some("2023-11-14T22:13:20Z"));
    let run = config.config().as_ref().unwrap();
    assert_eq!(run.entrypoint().as_deref(), Some(&["/usr/bin/ballast".to_owned()][..]));

    let inside = unpacked(&plain);
    assert_eq!(inside["usr/bin/ballast"], (0o755, b"program".to_vec()));
    assert_eq!(inside["usr/share/doc/x"].1.len(), 100_000);
    assert_eq!(inside["usr/"].0, 0o755);
}

#[test]
fn what_older_docker_reads_leads_to_the_same_blobs() {
    let parts = unpacked(&archive(&about(), &files()).unwrap().bytes);
    let old: Value = serde_json::from_slice(&parts["manifest.json"].1).unwrap();
    assert_eq!(old[0]["RepoTags"], json!(["localhost/ballast:1.2.3"]));
    let config = ImageConfiguration::from_reader(&*parts[old[0]["Config"].as_str().unwrap()].1).unwrap();
    assert_eq!(config.rootfs().diff_ids().len(), 1);
    assert!(parts.contains_key(old[0]["Layers"][0].as_str().unwrap()));
}

#[test]
fn the_same_files_give_the_same_bytes() {
    let one = archive(&about(), &files()).unwrap();
    assert_eq!(one.bytes, archive(&about(), &files()).unwrap().bytes);
    let mut other = files();
    other[0].content.push(b'!');
    assert_ne!(one.digest, archive(&about(), &other).unwrap().digest);
}
