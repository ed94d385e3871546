//! The cluster's images, built from scratch, under every image name that the cluster uses.

use std::path::PathBuf;

use anyhow::Result;

use super::workdir::Workdir;

/// Image of a pod's sandbox.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
/// Image of the cluster's DNS.
pub const COREDNS: &str = "registry.k8s.io/coredns/coredns:v1.12.4";
/// The server and client of the end-to-end tests: `test/utils/image/manifest.go` of the pinned Kubernetes.
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.66.1";

/// Builds the images, and returns the archive with all of them. Some are also under the names that Kubernetes 1.36 uses:
/// manifests that were written for its tests run unchanged.
pub fn make(workdir: &Workdir) -> Result<PathBuf> {
    let e2e = "registry.k8s.io/e2e-test-images";
    let (agnhost, pause) = (r#"["/agnhost"]|["pause"]"#, r#"["/agnhost", "pause"]|[]"#);
    let images = [
        format!("{AGNHOST}|{agnhost}"),
        format!("{e2e}/agnhost:2.63.0|{agnhost}"),
        format!("{PAUSE}|{pause}"),
        format!("registry.k8s.io/pause:3.10.1|{pause}"),
        format!(r#"{COREDNS}|["/coredns"]|[]"#),
        format!(r#"{e2e}/busybox:1.37.0-2|[]|["sh"]"#),
        format!(r#"{e2e}/busybox:1.37.0-1|[]|["sh"]"#),
        // A server that sends segments which conntrack finds invalid.
        format!(r#"{e2e}/regression-issue-74839:1.5|["/regression-issue-74839"]|[]"#),
    ];
    build(workdir, "images", &images)
}

/// Builds an image with this program of the cluster, and returns its archive. The image needs no entry point: static pods call
/// their program by its plain name.
pub fn make_of(workdir: &Workdir, program: &str, image: &str) -> Result<PathBuf> {
    build(workdir, program, &[format!("{image}|[]|[]")])
}

fn build(workdir: &Workdir, name: &str, images: &[String]) -> Result<PathBuf> {
    let folder = workdir.dir().join("images");
    let script = Workdir::script("images.sh")?.arg(&folder).arg(workdir.programs()).arg(name);
    script.args(images).read()?;
    Ok(folder.join(format!("{name}.tar")))
}
