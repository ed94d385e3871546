//! The cluster's images, built from scratch: one layer with agnhost, the DNS server and the tools that the end-to-end tests
//! call in pods, under every image name that the cluster uses.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::workdir::Workdir;
use crate::exec::{self, Cmd};

/// Image of a pod's sandbox.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
/// Image of the cluster's DNS.
pub const COREDNS: &str = "registry.k8s.io/coredns/coredns:v1.12.4";
/// The server and client of the end-to-end tests: `test/utils/image/manifest.go` of the pinned Kubernetes.
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.66.1";
/// A server that sends segments which conntrack finds invalid.
const ISSUE_74839: &str = "registry.k8s.io/e2e-test-images/regression-issue-74839:1.5";
const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox:1.37.0-2";

/// Programs of this machine that are copied into the layer with their libraries, and their names there. The wget is GNU's,
/// because the static one of busybox cannot resolve names.
const PROGRAMS: [(&str, &str); 7] = [
    ("curl", "curl"),
    ("nc.openbsd", "nc"),
    ("dig", "dig"),
    ("bash", "bash"),
    ("dash", "sh"),
    ("wget", "wget"),
    ("unshare", "unshare"),
];
/// Applets that are left out: busybox's own shell would prefer its applets to the programs beside it.
const NO_APPLETS: [&str; 3] = ["ash", "hush", "busybox"];

/// Builds the images, and returns the archive with all of them.
pub fn make(workdir: &Workdir) -> Result<PathBuf> {
    let dir = workdir.dir().join("images");
    let root = dir.join("root");
    for folder in ["bin", "tmp", "etc"] {
        fs::create_dir_all(root.join(folder)).context("cannot make the layer")?;
    }
    for name in ["agnhost", "coredns", "regression-issue-74839"] {
        copy(&workdir.programs().join(name), &root.join(name))?;
    }
    let busybox = exec::which("busybox").context("no busybox")?;
    copy(&busybox, &root.join("bin/busybox"))?;
    for applet in applets(&Cmd::new(&busybox).arg("--list").read()?) {
        symlink("busybox", root.join("bin").join(applet)).context("cannot link an applet")?;
    }
    for (program, name) in PROGRAMS {
        let file = exec::which(program).with_context(|| format!("no {program}"))?;
        copy(&file, &root.join("bin").join(name))?;
        for library in libraries(&Cmd::new("ldd").arg(&file).read()?) {
            copy(Path::new(library), &root.join(library.trim_start_matches('/')))?;
        }
    }
    pack(&dir, "images", &NAMES)
}

/// Builds an image of each name with these programs of the cluster, and returns their archive.
pub fn make_of(workdir: &Workdir, archive: &str, programs: &[&str], names: &[&str]) -> Result<PathBuf> {
    let dir = workdir.dir().join("images");
    for program in programs {
        copy(&workdir.programs().join(program), &dir.join("root/bin").join(program))?;
    }
    // The images need no entry point: static pods call their program by its plain name.
    let names: Vec<Image<'_>> = names.iter().map(|name| (*name, &[] as &[&str], &[] as &[&str])).collect();
    pack(&dir, archive, &names)
}

/// Packs images whose only layer is `dir/root`, and removes this directory.
fn pack(dir: &Path, name: &str, names: &[Image<'_>]) -> Result<PathBuf> {
    let root = dir.join("root");
    let layer = dir.join("layer.tar");
    let tar = Cmd::new("tar").args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-C"]);
    tar.arg(&root).arg("-cf").arg(&layer).arg(".").read()?;
    let digest = Cmd::new("sha256sum").arg(&layer).read()?;
    let digest = digest.split_whitespace().next().context("sha256sum printed nothing")?;

    let mut parts = vec!["manifest.json".to_owned(), "layer.tar".to_owned()];
    let mut manifest = Vec::new();
    for (number, (image, entry, args)) in names.iter().enumerate() {
        let file = format!("config-{number}.json");
        let config = config(entry, args, digest);
        fs::write(dir.join(&file), config.to_string()).context("cannot write an image's config")?;
        manifest.push(json!({ "Config": file, "RepoTags": [image], "Layers": ["layer.tar"] }));
        parts.push(file);
    }
    fs::write(dir.join("manifest.json"), json!(manifest).to_string()).context("cannot write a manifest")?;
    let archive = dir.join(format!("{name}.tar"));
    Cmd::new("tar").arg("-C").arg(dir).arg("-cf").arg(&archive).args(&parts).read()?;
    fs::remove_dir_all(&root)
        .and_then(|()| fs::remove_file(&layer))
        .context("cannot remove a layer's parts")?;
    Ok(archive)
}

/// Name, entry point and default arguments of an image.
type Image<'a> = (&'a str, &'a [&'a str], &'a [&'a str]);

/// The images of every cluster, also under the names that Kubernetes 1.36 uses: manifests that were written for its tests
/// run unchanged.
const NAMES: [Image<'static>; 8] = [
    (AGNHOST, &["/agnhost"], &["pause"]),
    ("registry.k8s.io/e2e-test-images/agnhost:2.63.0", &["/agnhost"], &["pause"]),
    (PAUSE, &["/agnhost", "pause"], &[]),
    ("registry.k8s.io/pause:3.10.1", &["/agnhost", "pause"], &[]),
    (COREDNS, &["/coredns"], &[]),
    (BUSYBOX, &[], &["sh"]),
    ("registry.k8s.io/e2e-test-images/busybox:1.37.0-1", &[], &["sh"]),
    (ISSUE_74839, &["/regression-issue-74839"], &[]),
];

fn config(entry: &[&str], args: &[&str], layer: &str) -> serde_json::Value {
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    json!({
        "architecture": architecture,
        "os": "linux",
        "config": { "Env": ["PATH=/bin:/usr/bin:/sbin:/"], "Entrypoint": entry, "Cmd": args },
        "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer}")] },
    })
}

fn applets(list: &str) -> impl Iterator<Item = &str> {
    let ours = |name: &str| PROGRAMS.iter().any(|(_, there)| *there == name) || NO_APPLETS.contains(&name);
    list.lines().map(str::trim).filter(move |name| !name.is_empty() && !ours(name))
}

/// Returns the files that ldd(1) prints; the vDSO has no file.
fn libraries(printed: &str) -> impl Iterator<Item = &str> {
    printed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let parent = to.parent().unwrap_or(to);
    fs::create_dir_all(parent)
        .and_then(|()| fs::copy(from, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
        .map(|_| ())
}
