//! The control plane, on the machine `control`.

use std::time::Duration;

use anyhow::{Result, bail};

use super::plan::{CONTROL_V4, POD_RANGES, SECOND_V4, SERVICE_RANGES};
use super::workdir::Workdir;
use crate::exec::Cmd;
use crate::signal::wait_for;

/// Time limit until an API server serves, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// The programs, in the order of their start.
pub const PROGRAMS: [&str; 4] = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];

/// Starts the control plane, and waits until the API server serves.
pub fn start(workdir: &Workdir) -> Result<()> {
    for program in &PROGRAMS[..2] {
        start_one(workdir, program)?;
    }
    await_api(workdir)?;
    for program in &PROGRAMS[2..] {
        start_one(workdir, program)?;
    }
    Ok(())
}

/// Starts one of the programs.
pub fn start_one(workdir: &Workdir, program: &str) -> Result<()> {
    let mut words = vec![program.to_owned()];
    words.extend(flags(workdir, program));
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    workdir.control().run(program, &words)
}

/// Name of the second API server.
pub const SECOND: &str = "kube-apiserver-2";

/// Starts a second API server at an address of its own, and waits until it serves.
pub fn start_second(workdir: &Workdir) -> Result<()> {
    let own =
        |flag: String| flag.replace(&format!("-address={CONTROL_V4}"), &format!("-address={SECOND_V4}"));
    let flags = flags(workdir, "kube-apiserver").into_iter().map(own);
    let words: Vec<_> = std::iter::once("kube-apiserver".to_owned()).chain(flags).collect();
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    workdir.control().run(SECOND, &words)?;
    let server = format!("--server=https://{SECOND_V4}:6443");
    wait_for("the second API server", PATIENCE, || {
        Ok(kubectl(workdir, &[&server, "get", "--raw", "/readyz", "--request-timeout=2s"]).try_read())
    })?;
    Ok(())
}

/// Waits until the API server serves.
pub fn await_api(workdir: &Workdir) -> Result<()> {
    let control = workdir.control();
    let log = control.log("kube-apiserver");
    wait_for(&format!("the API server; its log is {}", log.display()), PATIENCE, || {
        if !control.is_running("kube-apiserver") {
            bail!("the API server ended; its log is {}", log.display());
        }
        Ok(kubectl(workdir, &["get", "--raw", "/readyz", "--request-timeout=2s"]).try_read())
    })?;
    Ok(())
}

/// Returns a command that runs kubectl as the cluster's administrator.
pub fn kubectl(workdir: &Workdir, words: &[&str]) -> Cmd {
    workdir.control().command(&[&["kubectl"], words].concat())
}

fn flags(workdir: &Workdir, program: &str) -> Vec<String> {
    let key = |name: &str| workdir.key(name).display().to_string();
    let config = |user: &str| {
        let file = workdir.kubeconfig(user).display().to_string();
        ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
            .map(|flag| format!("--{flag}={file}"))
    };
    match program {
        "etcd" => [
            "--data-dir=/var/lib/etcd",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            // The cluster's data does not have to survive a power failure of this machine.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]
        .map(str::to_owned)
        .to_vec(),
        "kube-apiserver" => vec![
            "--etcd-servers=http://127.0.0.1:2379".into(),
            format!("--advertise-address={CONTROL_V4}"),
            // A second API server may listen on the same machine.
            format!("--bind-address={CONTROL_V4}"),
            format!("--service-cluster-ip-range={SERVICE_RANGES}"),
            format!("--client-ca-file={}", key("ca.crt")),
            format!("--tls-cert-file={}", key("server.crt")),
            format!("--tls-private-key-file={}", key("server.key")),
            format!("--token-auth-file={}", key("tokens.csv")),
            format!("--service-account-key-file={}", key("accounts.pub")),
            format!("--service-account-signing-key-file={}", key("accounts.key")),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            "--authorization-mode=Node,RBAC".into(),
            "--allow-privileged=true".into(),
            "--kubelet-preferred-address-types=InternalIP".into(),
            // Tests send many requests in a short time.
            "--max-requests-inflight=0".into(),
            "--enable-priority-and-fairness=false".into(),
        ],
        "kube-controller-manager" => {
            let mut flags = config("controller-manager").to_vec();
            flags.extend([
                format!("--service-account-private-key-file={}", key("accounts.key")),
                format!("--root-ca-file={}", key("ca.crt")),
                "--use-service-account-credentials".into(),
                "--leader-elect=false".into(),
                // Nodes are created with their pod ranges, which therefore do not depend on the order of registration.
                "--allocate-node-cidrs=false".into(),
                format!("--cluster-cidr={POD_RANGES}"),
                format!("--service-cluster-ip-range={SERVICE_RANGES}"),
                "--kube-api-qps=500".into(),
                "--kube-api-burst=1000".into(),
                "--concurrent-service-endpoint-syncs=10".into(),
            ]);
            flags
        }
        _ => {
            let mut flags = config("scheduler").to_vec();
            flags.push("--leader-elect=false".into());
            flags
        }
    }
}

/// Creates or changes objects.
pub fn apply(workdir: &Workdir, objects: &serde_json::Value) -> Result<()> {
    let file = workdir.write("apply.json", &objects.to_string())?;
    kubectl(workdir, &["apply", "-f", &file.display().to_string()]).read().map(|_| ())
}
