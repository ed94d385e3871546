//! The control plane, on the machine `control`.

use std::time::Duration;

use anyhow::Result;

use super::image::COREDNS;
use super::plan::{CONTROL_V4, DNS_SERVICE, POD_RANGES, SECOND_V4, SERVICE_RANGES};
use super::workdir::Workdir;
use crate::exec::Cmd;
use crate::signal::wait_for;

/// Time limit until an API server serves, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// The programs, in the order of their start.
pub const PROGRAMS: [&str; 4] = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"];

/// Starts the programs of the control plane that do not run, and waits until the API server serves.
pub fn start(workdir: &Workdir) -> Result<()> {
    let control = workdir.control();
    let start = |programs: &[&str]| {
        let mut ended = programs.iter().filter(|program| !control.is_running(program));
        ended.try_for_each(|program| start_at(workdir, program, program, CONTROL_V4))
    };
    start(&PROGRAMS[..2])?;
    // The others end if they find no API server for some seconds.
    await_api(workdir)?;
    start(&PROGRAMS[2..])
}

/// Starts a program with the name of its log and record, at an address.
fn start_at(workdir: &Workdir, program: &str, name: &str, address: &str) -> Result<()> {
    let keys = workdir.key("").display().to_string();
    let flags = include_str!("../../tools/cluster/flags")
        .replace("ADDRESS", address)
        .replace("SERVICES", SERVICE_RANGES)
        .replace("PODS", POD_RANGES)
        .replace("KEYS/", &keys)
        .replace("USERS", &workdir.dir().display().to_string());
    let own = flags.lines().filter_map(|line| line.strip_prefix(program)?.strip_prefix(' '));
    let words: Vec<_> = std::iter::once(program).chain(own).collect();
    workdir.control().run(name, &words)
}

/// Name of the second API server.
pub const SECOND: &str = "kube-apiserver-2";

/// Starts a second API server at an address of its own, and waits until it serves.
pub fn start_second(workdir: &Workdir) -> Result<()> {
    start_at(workdir, "kube-apiserver", SECOND, SECOND_V4)?;
    let server = format!("--server=https://{SECOND_V4}:6443");
    wait_for("the second API server", PATIENCE, || {
        Ok(kubectl(workdir, &[&server, "get", "--raw", "/readyz", "--request-timeout=2s"]).try_read())
    })?;
    Ok(())
}

/// Waits until the API server serves.
fn await_api(workdir: &Workdir) -> Result<()> {
    workdir.control().await_ready("kube-apiserver", "the API server", PATIENCE, || {
        kubectl(workdir, &["get", "--raw", "/readyz", "--request-timeout=2s"]).try_read()
    })
}

/// Returns a command that runs kubectl as the cluster's administrator.
pub fn kubectl(workdir: &Workdir, words: &[&str]) -> Cmd {
    workdir.control().command(&[&["kubectl"], words].concat())
}

/// Creates or changes objects.
pub fn apply(workdir: &Workdir, objects: &serde_json::Value) -> Result<()> {
    apply_text(workdir, &objects.to_string())
}

/// Creates or changes the objects of a manifest.
pub fn apply_text(workdir: &Workdir, objects: &str) -> Result<()> {
    let file = workdir.write("apply.yaml", objects)?;
    kubectl(workdir, &["apply", "-f", &file.display().to_string()]).read().map(|_| ())
}

/// Returns all objects of the cluster's DNS.
pub fn dns() -> String {
    let objects = include_str!("../../tools/cluster/coredns.yaml");
    objects.replace("IMAGE", COREDNS).replace("ADDRESS", DNS_SERVICE)
}
