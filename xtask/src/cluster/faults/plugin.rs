//! `kubectl ballast` as an administrator uses it: with no more permissions than `docs/kubectl.md` names.

use std::io::BufRead as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};
use fs_err as fs;
use fs_err::os::unix::fs::symlink;
use serde_json::{Value, json};

use super::agents::Agents;
use super::table::Unsupported;
use super::testbed::{self, SOON, Testbed};
use crate::cluster::plan::{CONTROL_V4, Node};
use crate::cluster::{Workdir, apply_text, deployed, kubectl};
use crate::exec::Cmd;
use crate::host;
use crate::signal;
use crate::workspace::Workspace;

/// Name of the account, of its roles and of their bindings.
const NAME: &str = "ballast-viewer";
/// File name of the plugin on the machine `control`: kubectl finds plugins by their names.
const PLUGIN: &str = "kubectl-ballast";

/// Runs each command of the plugin, and checks its output.
pub(super) fn asks_every_agent(testbed: &Testbed<'_>) -> Result<()> {
    if testbed.agents != Agents::Pods {
        return Err(
            Unsupported("agents that are processes of their nodes have no pods to ask in".into()).into()
        );
    }
    let workdir = testbed.workdir;
    let link = workdir.programs().join(PLUGIN);
    if !link.exists() {
        symlink("ballast", &link)?;
    }
    let user = viewer(workdir)?;
    let done = all(testbed, &user);
    let bindings = [format!("clusterrolebinding/{NAME}"), format!("clusterrole/{NAME}")];
    kubectl(workdir, &["delete", &bindings[0], &bindings[1]]).read()?;
    let own = [format!("rolebinding/{NAME}"), format!("role/{NAME}"), format!("serviceaccount/{NAME}")];
    kubectl(workdir, &["delete", "-n", deployed::SPACE, &own[0], &own[1], &own[2]]).read()?;
    done
}

/// Returns the kubeconfig of an account with the permissions in the page.
fn viewer(workdir: &Workdir) -> Result<PathBuf> {
    let page = Workspace::find()?.root().join("docs/kubectl.md");
    let text = fs::read_to_string(&page)?;
    apply_text(workdir, &rights(&text).context("docs/kubectl.md names no rights")?)?;
    apply_text(workdir, include_str!("../../../tools/cluster/viewer.yaml"))?;
    let token = kubectl(workdir, &["create", "token", NAME, "-n", deployed::SPACE]).read()?;
    let authority = workdir.key("ca.crt").display().to_string();
    let server = format!("https://{CONTROL_V4}:6443");
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "x", "cluster": { "server": server, "certificate-authority": authority } }],
        "users": [{ "name": "x", "user": { "token": token.trim() } }],
        "contexts": [{ "name": "x", "context": { "cluster": "x", "user": "x" } }],
        "current-context": "x",
    });
    workdir.write("viewer.conf", &config.to_string())
}

/// Returns the YAML blocks of the page: the second one continues the rules of the Role at the end of the first.
fn rights(page: &str) -> Option<String> {
    let blocks: Vec<_> =
        page.split("```yaml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    (!blocks.is_empty()).then(|| blocks.concat())
}

fn all(testbed: &Testbed<'_>, user: &std::path::Path) -> Result<()> {
    let plugin = |words: &[&str]| {
        let user = format!("KUBECONFIG={}", user.display());
        testbed.workdir.control().command(&[&["env", &user, "kubectl", "ballast"], words].concat())
    };
    let says = |words: &[&str], parts: &[&str]| -> Result<String> {
        let output = plugin(words).read()?;
        let missing = parts.iter().find(|part| !output.contains(**part));
        ensure!(
            missing.is_none(),
            "`kubectl ballast {}` does not say {missing:?}:\n{output}",
            words.join(" ")
        );
        Ok(output)
    };
    let nodes: Vec<_> = testbed.nodes().iter().map(Node::to_string).collect();
    let names: Vec<_> = nodes.iter().map(String::as_str).collect();
    says(&["status"], &names)?;
    let one = says(&["status", "--node", names[0]], &names[..1])?;
    ensure!(!one.contains(names[1]), "--node asks others, too:\n{one}");
    let wrong = plugin(&["status", "--node", "node11"]).read().unwrap_or_else(|error| format!("{error:#}"));
    ensure!(wrong.contains("no agent runs on node node11"), "of a node that is not there: {wrong}");

    let every = format!("{0}/{0}", names.len());
    says(&["service", "list"], &[testbed::NAME, testbed::ADDRESS, &every])?;
    let target = format!("svc/default/{}:80", testbed::NAME);
    let last = names[names.len() - 1];
    let pod = format!("pod default/{} on node {last}", testbed::CLIENT);
    says(
        &["explain", &format!("pod/default/{}", testbed::CLIENT), &target],
        &[&pod, testbed::ADDRESS, "10.244."],
    )?;
    says(
        &["explain", &format!("node/{}", names[0]), &format!("svc/{}", testbed::NAME)],
        &[names[0], "10.244."],
    )?;

    let object = format!("service/{}", testbed::NAME);
    says(&["wait", &object, "--programmed"], &["programmed"])?;
    // Wait right after a change of the endpoints: afterwards every node serves them.
    testbed.scale(testbed::PODS + 1)?;
    says(&["wait", &object, "--programmed"], &["programmed"])?;
    super::rolling::await_equal(testbed)?;
    testbed.scale(testbed::PODS)?;

    let service = format!("default/{}", testbed::NAME);
    let words = ["monitor", "-o", "json", "--kind=new", &service, "--timeout=5m"];
    let mut monitor = plugin(&words).into_std();
    monitor.stdin(Stdio::null()).stdout(Stdio::piped());
    let monitor = KillOnDrop(monitor.spawn().context("cannot start the monitor")?);
    monitored(testbed, monitor)?;

    let workspace = Workspace::find()?;
    let shown = deployed::upgrade(&workspace, testbed.workdir, &["--set", "page=services"])
        .and_then(|()| page(testbed, plugin(&["ui", "--port", "0"])));
    deployed::upgrade(&workspace, testbed.workdir, &[])?;
    shown
}

/// Checks that the page of the cluster is served, with frames of every node and the history of a Service.
fn page(testbed: &Testbed<'_>, ui: Cmd) -> Result<()> {
    let mut ui = ui.into_std();
    ui.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut ui = KillOnDrop(ui.spawn().context("cannot start `kubectl ballast ui`")?);
    let mut line = String::new();
    let output = ui.0.stdout.take().context("no output")?;
    std::io::BufReader::new(output).read_line(&mut line).context("`kubectl ballast ui` says nothing")?;
    let nodes = testbed.nodes();
    ensure!(line.contains(&format!("shows {} nodes", nodes.len())), "`kubectl ballast ui` says: {line}");
    let address = line.split_whitespace().next().context("no address")?.to_owned();
    let get = |path: &str, seconds: &str| {
        let url = format!("{address}{path}");
        testbed.workdir.control().command(&["curl", "-sSN", "-m", seconds, &url])
    };
    let html = get("", "5").read()?;
    ensure!(html.contains("<html"), "no page at {address}: {html}");
    let mut missing: Vec<_> = nodes.iter().map(Node::to_string).collect();
    let mut trouble = String::new();
    signal::wait_for("a frame of every node on the page", SOON, || {
        // The stream does not end: curl ends at its time limit, with an exit status for this.
        let script = format!("curl -sN -m 4 '{address}page/events?filter=&service='; true");
        let stream = testbed.workdir.control().command(&["sh", "-c", &script]).read()?;
        for data in stream.lines().filter_map(|line| line.strip_prefix("data:")) {
            let frame: Value = serde_json::from_str(data).with_context(|| format!("no frame: {data}"))?;
            match frame["trouble"].as_str() {
                Some(text) => trouble = format!("{}: {text}", frame["node"]),
                None => missing.retain(|node| frame["node"] != **node),
            }
        }
        Ok(missing.is_empty().then_some(()))
    })
    .with_context(|| format!("no frame of {missing:?}; {trouble}"))?;
    let history = get(&format!("page/history?filter=&service=default/{}", testbed::NAME), "10").read()?;
    let history: Value = serde_json::from_str(&history).with_context(|| format!("no history: {history}"))?;
    ensure!(history.is_object(), "no history: {history}");
    Ok(())
}

/// Checks that events of every node arrive, and that no monitor remains in the pods after the plugin was killed.
fn monitored(testbed: &Testbed<'_>, mut monitor: KillOnDrop) -> Result<()> {
    let workdir = testbed.workdir;
    let running = |node: Node| -> Result<usize> {
        let script = "for file in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $file; echo; done 2>/dev/null | \
                      grep -c '^ballast monitor' || true";
        let count = workdir.node(node).command(&["sh", "-c", script]).read()?;
        count.trim().parse().context("no number")
    };
    signal::wait_for("a monitor in the pod of every node", SOON, || {
        let all = testbed.nodes().into_iter().map(running).collect::<Result<Vec<_>>>()?;
        Ok(all.iter().all(|count| *count == 1).then_some(()))
    })?;
    let mut missing: Vec<_> = testbed.nodes().iter().map(Node::to_string).collect();
    let output = monitor.0.stdout.take().context("no output")?;
    let (sender, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let lines = std::io::BufReader::new(output).lines().map_while(Result::ok);
        lines.into_iter().try_for_each(|line| sender.send(line))
    });
    signal::wait_for("an event of every node", SOON, || {
        for node in testbed.nodes() {
            testbed.answers_on(node);
        }
        while let Ok(line) = lines.try_recv() {
            let event: Value = serde_json::from_str(&line).with_context(|| format!("no event: {line}"))?;
            ensure!(event["kind"] == "new", "not asked for: {line}");
            missing.retain(|node| event["node"] != **node);
        }
        Ok(missing.is_empty().then_some(()))
    })?;
    drop(monitor);
    signal::wait_for("the monitors in the pods to end", SOON, || {
        let all = testbed.nodes().into_iter().map(running).collect::<Result<Vec<_>>>()?;
        Ok(all.iter().all(|count| *count == 0).then_some(()))
    })
}

/// A process that is killed, with its children, when this is dropped.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // The started process is nsenter; its child is kubectl, which executes the plugin in the same process.
        for child in host::children_of(self.0.id()) {
            host::kill(child.cast_signed(), libc::SIGKILL);
        }
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_the_rights() {
        let page = include_str!("../../../../docs/kubectl.md");
        let rights = rights(page).unwrap();
        for part in
            ["kind: ClusterRole", "kind: Role\n", "pods/exec", "pods/portforward", NAME, deployed::SPACE]
        {
            assert!(rights.contains(part), "{part}: {rights}");
        }
    }
}
