//! Builds programs of other projects once from pinned Go modules: the API server, and the parts of a cluster.
//!
//! `xtask/tools/*/go.mod` pin the versions; the programs are put at `<cache>/tools/<name>-<version>`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result};
use fs_err::{self as fs, File};

use crate::exec::Cmd;
use crate::workspace::{self, Workspace};
use crate::{go, log};

const KUBERNETES: &str = "k8s.io/kubernetes";
/// Suffix of the names of programs that contain their version, so that older files in the cache without it are not used.
const STAMPED: &str = "-stamped";

/// A program of a Go module, and the folder under `xtask/tools` that pins it.
#[derive(Clone, Copy, Debug)]
pub struct Tool {
    /// Name of the program.
    pub name: &'static str,
    folder: &'static str,
    module: &'static str,
    /// The package below the module; `.`: that of the folder.
    path: &'static str,
    is_test: bool,
    is_cgo: bool,
    /// Build tags.
    tags: &'static str,
}

impl Tool {
    const fn new(name: &'static str, folder: &'static str, module: &'static str, path: &'static str) -> Self {
        Self { name, folder, module, path, is_test: false, is_cgo: false, tags: "" }
    }

    const fn kubernetes(name: &'static str, path: &'static str) -> Self {
        Self::new(name, "kubernetes", KUBERNETES, path)
    }

    const fn containerd(name: &'static str, path: &'static str) -> Self {
        Self::new(name, "containerd", "github.com/containerd/containerd/v2", path)
    }

    const fn cilium(name: &'static str, path: &'static str) -> Self {
        Self::new(name, "cilium", "github.com/cilium/cilium", path)
    }

    fn package(&self) -> String {
        if self.path == "." { ".".to_owned() } else { format!("{}{}", self.module, self.path) }
    }

    fn is_kubernetes(&self) -> bool {
        self.module == KUBERNETES
    }

    /// Returns the linker's flags, which write the version into programs of Kubernetes, because Helm and others ask for it.
    fn link_flags(&self, version: &str) -> String {
        let mut flags = "-s -w".to_owned();
        if self.is_kubernetes() {
            let mut numbers = version.trim_start_matches('v').split('.');
            let values = [
                ("gitVersion", version),
                ("gitMajor", numbers.next().unwrap_or_default()),
                ("gitMinor", numbers.next().unwrap_or_default()),
            ];
            for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
                for (name, value) in values {
                    let _ = write!(flags, " -X {package}.{name}={value}");
                }
            }
        }
        flags
    }
}

/// The API server's store.
pub const ETCD: Tool = Tool::new("etcd", "etcd", "go.etcd.io/etcd/server/v3", "");
/// The API server.
pub const API_SERVER: Tool = Tool::kubernetes("kube-apiserver", "/cmd/kube-apiserver");
/// kube-proxy, for comparisons.
pub const KUBE_PROXY: Tool = Tool::kubernetes("kube-proxy", "/cmd/kube-proxy");
/// The OpenTelemetry Collector's OTLP receiver, to which the agent exports.
pub const OTLP_RECEIVER: Tool =
    Tool::new("otlp-receiver", "otlp", "go.opentelemetry.io/collector/receiver/otlpreceiver", ".");
/// Installs clusters.
pub const KUBEADM: Tool = Tool::kubernetes("kubeadm", "/cmd/kubeadm");
/// Renders and checks the chart.
pub const HELM: Tool = Tool::new("helm", "helm", "helm.sh/helm/v3", "/cmd/helm");
/// Checks the workflows.
pub const ACTIONLINT: Tool =
    Tool::new("actionlint", "actionlint", "github.com/rhysd/actionlint", "/cmd/actionlint");

/// The programs of a cluster, besides etcd and the API server.
pub const CLUSTER: [Tool; 10] = [
    Tool::kubernetes("kube-controller-manager", "/cmd/kube-controller-manager"),
    Tool::kubernetes("kube-scheduler", "/cmd/kube-scheduler"),
    Tool::kubernetes("kubelet", "/cmd/kubelet"),
    Tool::kubernetes("kubectl", "/cmd/kubectl"),
    Tool::kubernetes("agnhost", "/test/images/agnhost"),
    Tool::kubernetes("regression-issue-74839", "/test/images/regression-issue-74839"),
    Tool::containerd("containerd", "/cmd/containerd"),
    Tool::containerd("containerd-shim-runc-v2", "/cmd/containerd-shim-runc-v2"),
    Tool::containerd("ctr", "/cmd/ctr"),
    Tool::new("coredns", "coredns", "github.com/coredns/coredns", "."),
];

/// Flannel: the daemon of each node, and the CNI plugin. The daemon's backend `udp` has a part in C.
pub const FLANNEL: [Tool; 2] = [
    Tool { is_cgo: true, ..Tool::new("flanneld", "flannel", "github.com/flannel-io/flannel", "") },
    Tool::new("flannel", "flannel-cni", "github.com/containernetworking/plugins", "/plugins/meta/flannel"),
];

/// kube-router, the daemon of each node; its CNI plugins are the reference plugins.
pub const KUBE_ROUTER: [Tool; 1] = [Tool::new(
    "kube-router",
    "kube-router",
    "github.com/cloudnativelabs/kube-router/v2",
    "/cmd/kube-router",
)];

/// Cilium: the agent of each node, the operator with the address management that needs no cloud, and the CNI plugin.
pub const CILIUM: [Tool; 3] = [
    Tool::cilium("cilium-agent", "/daemon"),
    Tool { tags: "ipam_provider_operator", ..Tool::cilium("cilium-operator-generic", "/operator") },
    Tool::cilium("cilium-cni", "/plugins/cilium-cni"),
];

/// Kubernetes' own end-to-end tests, and ginkgo, which runs several of them at once.
pub const SUITE: [Tool; 2] = [
    Tool { is_test: true, ..Tool::kubernetes("e2e.test", "/test/e2e") },
    Tool::new("ginkgo", "kubernetes", "github.com/onsi/ginkgo/v2", "/ginkgo"),
];

/// Finds or builds programs, one after the other; a second caller waits for the first.
pub fn build(workspace: &Workspace, wanted: &[Tool]) -> Result<Vec<PathBuf>> {
    let tools = workspace::cache()?.join("tools");
    fs::create_dir_all(&tools)?;
    let lock = File::create(tools.join("lock"))?;
    lock.lock().context("cannot take the lock of the tools")?;
    wanted.iter().map(|tool| one(workspace, &tools, tool)).collect()
}

/// Returns the version of a tool's module that the project pins.
pub fn version(workspace: &Workspace, tool: &Tool) -> Result<String> {
    let pins = fs::read_to_string(folder(workspace, tool).join("go.mod"))
        .with_context(|| format!("no go.mod for {}", tool.name))?;
    let version = pinned(&pins, tool.module);
    version.map(str::to_owned).with_context(|| format!("go.mod does not pin {}", tool.module))
}

/// Returns the folder with the source of a tool's module.
pub fn source(workspace: &Workspace, tool: &Tool) -> Result<PathBuf> {
    let folder = folder(workspace, tool);
    let list = |words: &[&str]| {
        Cmd::new(go::find_or_install()?).args(words).env("GOWORK", "off").dir(&folder).read()
    };
    list(&["mod", "download", tool.module])?;
    let module = list(&["list", "-mod=readonly", "-m", "-f", "{{.Dir}}", tool.module])?;
    Ok(PathBuf::from(module.trim()))
}

fn folder(workspace: &Workspace, tool: &Tool) -> PathBuf {
    workspace.root().join("xtask/tools").join(tool.folder)
}

fn one(workspace: &Workspace, tools: &Path, tool: &Tool) -> Result<PathBuf> {
    let version = version(workspace, tool)?;
    let file = format!("{}-{version}{}", tool.name, if tool.is_kubernetes() { STAMPED } else { "" });
    let binary = tools.join(&file);
    if binary.exists() {
        return Ok(binary);
    }
    let go = go::find_or_install()?;
    let start = Instant::now();
    log::step(format_args!("build {} {version} from its Go modules, once (minutes)", tool.name));
    let unfinished = tools.join(format!("{file}.unfinished"));
    // Low priority, because the user waits for the work that runs at the same time.
    let build = Cmd::new("nice").args(["-n", "10"]).arg(&go);
    let build = if tool.is_test { build.args(["test", "-c", "-vet=off"]) } else { build.arg("build") };
    build
        .args(["-mod=readonly", "-trimpath", "-tags", tool.tags])
        .args(["-ldflags", &tool.link_flags(&version), "-o"])
        .arg(&unfinished)
        .arg(tool.package())
        .env("CGO_ENABLED", if tool.is_cgo { "1" } else { "0" })
        .env("GOWORK", "off")
        // `GOROOT` would make a downloaded Go release use the standard library of another release.
        .without_env("GOROOT")
        .dir(folder(workspace, tool))
        .read()?;
    fs::rename(&unfinished, &binary)?;
    log::line(format_args!("    {} {version}: {}", tool.name, log::seconds(start.elapsed())));
    Ok(binary)
}

/// Returns the version of a module that a go.mod requires.
fn pinned<'a>(go_mod: &'a str, module: &str) -> Option<&'a str> {
    go_mod.lines().filter(|line| !line.contains("=>")).find_map(|line| {
        let mut words = line.trim().trim_start_matches("require ").split_whitespace();
        (words.next()? == module).then(|| words.next()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kubernetes_gets_its_version() {
        let flags = KUBE_PROXY.link_flags("v1.37.2");
        for part in ["component-base/version.gitVersion=v1.37.2 ", "pkg/version.gitMajor=1 ", ".gitMinor=37"]
        {
            assert!(flags.contains(part), "{flags}");
        }
        assert_eq!(ETCD.link_flags("v3.6.8"), "-s -w");
    }

    #[test]
    fn every_tool_is_pinned_in_the_project() {
        for tool in [ETCD, API_SERVER, KUBE_PROXY, OTLP_RECEIVER, KUBEADM, HELM, ACTIONLINT]
            .into_iter()
            .chain(CLUSTER)
            .chain(FLANNEL)
            .chain(KUBE_ROUTER)
            .chain(CILIUM)
            .chain(SUITE)
        {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools").join(tool.folder).join("go.mod");
            let text = fs::read_to_string(file).unwrap();
            assert!(
                pinned(&text, tool.module).is_some_and(|version| version.starts_with('v')),
                "{}",
                tool.name
            );
            let is_named = text.lines().any(|line| line.trim().trim_start_matches("tool ") == tool.package());
            assert!(tool.path == "." || is_named, "{}", tool.name);
        }
    }
}
