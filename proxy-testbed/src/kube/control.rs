//! etcd and kube-apiserver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use super::api::Api;
use super::process::Process;
use super::{PATIENCE, eventually, manifests, tail};

/// Address of the API server.
pub const ADDRESS: &str = "192.0.2.1";
/// Address of a second API server.
pub const SECOND: &str = "192.0.2.2";
/// Port of the API servers that agents know.
pub const PORT: u16 = 6443;
/// A port that agents do not know.
const HIDDEN_PORT: u16 = 6444;
const ETCD: &str = "http://127.0.0.1:2379";
/// Token of the administrator, who may do everything.
const ADMIN_TOKEN: &str = "test-admin";
/// Token of the agent's user, who may do only what an agent needs.
const AGENT_TOKEN: &str = "test-agent";

/// Returns the paths of kube-apiserver and etcd, which `cargo xtask test` sets in the environment.
pub fn binaries() -> Result<[PathBuf; 2]> {
    let named =
        |name| std::env::var_os(name).map(PathBuf::from).with_context(|| format!("{name} is not set"));
    Ok([named("BALLAST_KUBE_APISERVER")?, named("BALLAST_ETCD")?])
}

/// An API server with its etcd; both end when the value is dropped.
pub struct ControlPlane {
    server: Option<(u16, Process)>,
    _etcd: Process,
    /// The administrator's client, which the case uses.
    pub api: Api,
    folder: TempDir,
    is_permitted: bool,
}

/// API path of the bindings of roles to users.
const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

impl ControlPlane {
    /// Starts etcd and the API server, and waits until they work.
    pub fn start() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ballast-apiserver-").tempdir()?;
        let path = folder.path();
        let tokens = format!(
            "{ADMIN_TOKEN},admin,1,\"system:masters\"\n{AGENT_TOKEN},ballast,2,\"system:authenticated\"\n"
        );
        fs::write(path.join("tokens"), tokens)?;
        let mut etcd = Command::new(&binaries()?[1]);
        etcd.arg("--data-dir").arg(path.join("etcd")).arg("--unsafe-no-fsync");
        etcd.args(["--listen-client-urls", ETCD, "--advertise-client-urls", ETCD]);
        etcd.args(["--listen-peer-urls", "http://127.0.0.1:2380", "--log-level", "warn"]);
        let etcd = Process::start(&mut etcd, &path.join("etcd.log"))?;
        let server = start_server(path, ADDRESS, PORT)?;
        // The kubeconfigs need the certificate, which the API server generates itself.
        let certificate = path.join("certs/apiserver.crt");
        eventually(PATIENCE, || {
            fs::metadata(&certificate).context("the API server has made no certificate")
        })?;
        write_kubeconfig(path, "agent", AGENT_TOKEN, &certificate)?;
        let admin = write_kubeconfig(path, "admin", ADMIN_TOKEN, &certificate)?;
        let api = eventually(PATIENCE, || Api::connect(&admin, None))?;
        let server = Some((PORT, server));
        let mut control = Self { server, _etcd: etcd, api, folder, is_permitted: false };
        control.is_ready()?;
        control.api.create_raw("/api/v1/namespaces", &json!({ "metadata": { "name": "other" } }))?;
        control.create_role()?;
        control.permit()?;
        Ok(control)
    }

    /// Path of the agents' kubeconfig.
    pub fn agent_kubeconfig(&self) -> PathBuf {
        self.folder.path().join("agent.yaml")
    }

    /// Path of the administrator's kubeconfig.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.folder.path().join("admin.yaml")
    }

    /// A folder for files that are removed with the control plane.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The process id of the API server.
    pub fn server_id(&self) -> Result<u32> {
        self.server.as_ref().map(|(_, server)| server.id()).context("the API server does not run")
    }

    /// Kills the API server with SIGKILL, because a graceful shutdown is slow.
    pub fn kill(&mut self) -> Result<()> {
        let (_, server) = self.server.take().context("the API server does not run")?;
        server.kill()
    }

    /// Starts the API server again at its port.
    pub fn restart(&mut self) -> Result<()> {
        self.restart_at(PORT)
    }

    /// Starts the API server again at a port that no agent knows.
    pub fn restart_hidden(&mut self) -> Result<()> {
        self.restart_at(HIDDEN_PORT)
    }

    fn restart_at(&mut self, port: u16) -> Result<()> {
        ensure!(self.server.is_none(), "the API server runs already");
        self.server = Some((port, start_server(self.folder.path(), ADDRESS, port)?));
        let server = format!("https://{ADDRESS}:{port}");
        self.api = Api::connect(&self.admin_kubeconfig(), Some(&server))?;
        self.is_ready()
    }

    /// Starts a second API server on the same etcd, and waits until it works. Returns its process, which ends when it is dropped,
    /// and the path of a kubeconfig for agents, which trusts both servers. `api` stays connected to the first server.
    pub fn start_second(&mut self) -> Result<(Process, PathBuf)> {
        let path = self.folder.path();
        let server = start_server(path, SECOND, PORT)?;
        let certificates = [ADDRESS, SECOND].map(|address| certificates(path, address).join("apiserver.crt"));
        eventually(PATIENCE, || Ok(fs::metadata(&certificates[1])?))?;
        let both = certificates.iter().map(fs::read).collect::<Result<Vec<_>, _>>()?.concat();
        let bundle = path.join("both.crt");
        fs::write(&bundle, both)?;
        let kubeconfig = write_kubeconfig(path, "agent-of-both", AGENT_TOKEN, &bundle)?;
        let admin = write_kubeconfig(path, "admin-of-both", ADMIN_TOKEN, &bundle)?;
        let second = format!("https://{SECOND}:{PORT}");
        let api = Api::connect(&admin, Some(&second))?;
        eventually(2 * PATIENCE, || api.get_raw("/readyz"))?;
        Ok((server, kubeconfig))
    }

    /// Connects `api` to the second API server.
    pub fn use_second(&mut self) -> Result<()> {
        let second = format!("https://{SECOND}:{PORT}");
        self.api = Api::connect(&self.folder.path().join("admin-of-both.yaml"), Some(&second))?;
        Ok(())
    }

    /// Connects `api` to the first API server.
    pub fn use_first(&mut self) -> Result<()> {
        self.api = Api::connect(&self.admin_kubeconfig(), None)?;
        Ok(())
    }

    /// Restores the initial state, whatever the previous case has done.
    pub fn reset(&mut self) -> Result<()> {
        let serves = match &mut self.server {
            Some((port, server)) => *port == PORT && server.is_alive().is_ok(),
            None => false,
        };
        if serves {
            // The previous case may have connected `api` to the second server.
            self.api = Api::connect(&self.admin_kubeconfig(), None)?;
        } else {
            self.server = None;
            self.restart()?;
        }
        if !self.is_permitted {
            self.permit()?;
        }
        self.api.clear()
    }

    /// Waits until the API server is ready and has created the slice of its own Service, which it does a little later.
    fn is_ready(&mut self) -> Result<()> {
        let wait = || {
            if let Some((_, server)) = &mut self.server {
                server.is_alive()?;
            }
            self.api.get_raw("/readyz")?;
            let kubernetes = self.api.slices()?;
            ensure!(
                kubernetes.iter().any(|slice| slice.metadata.name.as_deref() == Some("kubernetes")),
                "no slice"
            );
            Ok(())
        };
        let log = self.folder.path().join("apiserver.log");
        eventually(2 * PATIENCE, wait).with_context(|| format!("no API server\n{}", tail(&log)))
    }

    /// Creates the agent's `ClusterRole` of the manifests.
    fn create_role(&self) -> Result<()> {
        self.api.create_raw("/apis/rbac.authorization.k8s.io/v1/clusterroles", &manifests::role()?)
    }

    /// Binds the agent's user to its role.
    pub fn permit(&mut self) -> Result<()> {
        let group = "rbac.authorization.k8s.io";
        let binding = json!({
            "metadata": { "name": "ballast" },
            "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": "ballast" },
            "subjects": [{ "apiGroup": group, "kind": "User", "name": "ballast" }],
        });
        self.api.create_raw(BINDINGS, &binding)?;
        self.is_permitted = true;
        Ok(())
    }

    /// Removes the binding, and waits until the API server denies access to the agent's user.
    pub fn forbid(&mut self) -> Result<()> {
        self.api.delete_raw(&format!("{BINDINGS}/ballast"))?;
        self.is_permitted = false;
        let agent = Api::connect(&self.agent_kubeconfig(), None)?;
        eventually(PATIENCE, || {
            ensure!(agent.services().is_err(), "the agent's user may still read Services");
            Ok(())
        })
    }
}

/// Returns the folder of the certificate of the API server with this address.
fn certificates(folder: &Path, address: &str) -> PathBuf {
    folder.join(if address == ADDRESS { "certs".to_owned() } else { format!("certs-{address}") })
}

fn start_server(folder: &Path, address: &str, port: u16) -> Result<Process> {
    let certificates = certificates(folder, address);
    // The server does not start without a key for service account tokens. No test uses such tokens, so its TLS key is enough.
    let key = certificates.join("apiserver.key");
    let mut command = Command::new(&binaries()?[0]);
    command.arg(format!("--etcd-servers={ETCD}"));
    command.arg(format!("--bind-address={address}")).arg(format!("--advertise-address={address}"));
    if address != ADDRESS {
        // The cases expect that the Service `kubernetes` has one endpoint: the second server must not add its own.
        command.arg("--endpoint-reconciler-type=none");
    }
    command.arg(format!("--secure-port={port}")).arg("--cert-dir").arg(&certificates);
    command.arg("--service-account-key-file").arg(&key).arg("--service-account-signing-key-file").arg(&key);
    command.arg("--service-account-issuer=https://kubernetes.default.svc");
    command.arg("--service-cluster-ip-range=10.96.0.0/16,fd96::/108");
    command.arg("--token-auth-file").arg(folder.join("tokens")).arg("--authorization-mode=RBAC");
    command.args([
        "--allow-privileged=true",
        "--enable-priority-and-fairness=false",
        "--max-requests-inflight=0",
    ]);
    let log = if address == ADDRESS { "apiserver.log" } else { "apiserver-2.log" };
    Process::start(&mut command, &folder.join(log))
}

fn write_kubeconfig(folder: &Path, name: &str, token: &str, trusted: &Path) -> Result<PathBuf> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "test", "cluster": {
            "server": format!("https://{ADDRESS}:{PORT}"),
            "certificate-authority": trusted,
        } }],
        "users": [{ "name": name, "user": { "token": token } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": name } }],
        "current-context": "test",
    });
    let path = folder.join(format!("{name}.yaml"));
    fs::write(&path, serde_json::to_vec(&config)?)?;
    Ok(path)
}
