//! Runs the commands of docs/migration.md on a cluster of kubeadm, to Ballast and back, while clients use its Services.

use anyhow::{Context as _, Result, bail, ensure};
use fs_err as fs;

use super::deployed::SPACE;
use super::kubeadm::{ADMIN, NODES, PATIENCE, kubectl};
use super::machine::Machine;
use super::plan::{API_SERVICE, Node};
use super::workdir::Workdir;
use crate::chart::Helm;
use crate::workspace::Workspace;
use crate::{log, signal};

const PAGE: &str = "docs/migration.md";
/// Text of a comment before a command that fails for a while.
const RETRIED: &str = "Run it again";
/// A Service for clients outside, and its endpoints.
const OUTSIDE: &str = "dns-outside";

/// Migrates to Ballast and back. Returns an error if a command fails, if rules or programs of the other proxy remain, or if a
/// request of a client fails.
pub fn run(workspace: &Workspace, workdir: &Workdir) -> Result<()> {
    let page = workspace.root().join(PAGE);
    let page = fs::read_to_string(&page)?;
    let folder = workdir.dir().join("migration");
    fs::create_dir_all(&folder)?;
    fs_err::os::unix::fs::symlink(workspace.root().join("deploy"), folder.join("deploy"))?;
    workdir.link("helm", Helm::find(workspace)?.program())?;
    let expose =
        ["expose", "deployment", "coredns", "-n", SPACE, "--name", OUTSIDE, "--type=NodePort", "--port=53"];
    kubectl(workdir, &expose).read()?;
    let clients = Clients::start(workdir)?;
    for (heading, before, after) in
        [("to Ballast", Rules::KubeProxy, Rules::None), ("back to kube-proxy", Rules::None, Rules::KubeProxy)]
    {
        log::step(format_args!("{PAGE}: {heading}"));
        before.check(workdir)?;
        for command in commands(&page, &format!("## A cluster: {heading}"))? {
            command.run(workdir)?;
        }
        after.check(workdir)?;
        clients.check()?;
    }
    clients.stop()
}

/// Which proxy has rules or programs on the nodes.
#[derive(Clone, Copy)]
enum Rules {
    KubeProxy,
    None,
}

impl Rules {
    /// Checks the rules of kube-proxy, and that Ballast's maps exist only without them.
    fn check(self, workdir: &Workdir) -> Result<()> {
        for on in NODES {
            let machine = workdir.node(on);
            let rules = machine.command(&["sh", "-c", "iptables-save; nft list ruleset"]).read()?;
            let has_rules = rules.contains("KUBE-SVC") || rules.contains("table ip kube-proxy");
            let has_maps = machine.command(&["test", "-e", "/sys/fs/bpf/ballast"]).succeeds();
            let expected = matches!(self, Self::KubeProxy);
            ensure!(has_rules == expected, "{on}: rules of kube-proxy: {has_rules}");
            ensure!(has_maps != expected, "{on}: maps of Ballast: {has_maps}");
        }
        Ok(())
    }
}

/// A line of a block of commands.
#[derive(Debug, PartialEq)]
struct Command {
    line: String,
    is_retried: bool,
}

/// Returns the commands of a section of the page, line by line.
fn commands(page: &str, heading: &str) -> Result<Vec<Command>> {
    let (_, section) =
        page.split_once(&format!("{heading}\n")).with_context(|| format!("{PAGE} has no `{heading}`"))?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let (mut is_inside, mut is_retried, mut found) = (false, false, Vec::new());
    for line in section.lines().map(str::trim) {
        match line.strip_prefix("```") {
            Some(language) => is_inside = !is_inside && language == "sh",
            None if !is_inside || line.is_empty() => {}
            None if line.starts_with('#') => is_retried = line.contains(RETRIED),
            None => {
                found.push(Command { line: line.to_owned(), is_retried });
                is_retried = false;
            }
        }
    }
    ensure!(!found.is_empty(), "`{heading}` in {PAGE} has no commands");
    Ok(found)
}

impl Command {
    fn run(&self, workdir: &Workdir) -> Result<()> {
        let line = self.line.replace("ADDRESS", &NODES[0].v4()).replace("REGISTRY/", "localhost/");
        log::line(format_args!("    $ {line}"));
        let folder = workdir.dir().join("migration").display().to_string();
        // As the page says, `ballast status` exits with 1 while kube-proxy has the ports.
        let is_status = line.contains("ballast status");
        let ending = if is_status { " || true" } else { "" };
        let script = format!("cd {folder} && KUBECONFIG={ADMIN} && export KUBECONFIG && {line}{ending}");
        let command = || workdir.node(NODES[0]).command(&["sh", "-c", &script]);
        let output = if self.is_retried {
            signal::wait_for(&line, PATIENCE, || Ok(command().try_read()))?
        } else {
            command().read()?
        };
        output.lines().for_each(|line| log::line(format_args!("    {line}")));
        ensure!(!is_status || output.contains("kube-proxy"), "`ballast status` does not name kube-proxy");
        Ok(())
    }
}

/// Clients on the nodes and outside that make one connection after the other. Each writes a line per request to its log.
struct Clients(Vec<(Machine, &'static str)>);

impl Clients {
    fn start(workdir: &Workdir) -> Result<Self> {
        let path = "jsonpath={.spec.ports[0].nodePort}";
        let port = kubectl(workdir, &["get", "service", OUTSIDE, "-n", SPACE, "-o", path]).read()?;
        let name = "kubernetes.default.svc.cluster.local";
        let [first, second] =
            NODES.map(|on: Node| format!("dig +tcp +time=5 +tries=1 +short -p {port} @{} {name}", on.v4()));
        let api = format!("curl -sk -m 5 https://{API_SERVICE}/livez");
        let clients = Self(vec![
            (workdir.node(NODES[0]), "client-node"),
            (workdir.node(NODES[1]), "client-node"),
            (workdir.control(), "client-first"),
            (workdir.control(), "client-second"),
        ]);
        for ((machine, client), request) in clients.0.iter().zip([&api, &api, &first, &second]) {
            let once = format!("out=$({request} 2>&1); echo $? $(date +%T) $out");
            signal::wait_for(client, PATIENCE, || {
                Ok(machine.command(&["sh", "-c", request]).succeeds().then_some(()))
            })?;
            machine.run(client, &["sh", "-c", &format!("while :; do {once}; sleep 0.1; done")])?;
        }
        Ok(clients)
    }

    /// Returns an error if a request has failed.
    fn check(&self) -> Result<()> {
        let mut total = 0;
        for (machine, client) in &self.0 {
            let file = machine.log(client);
            let text = fs::read_to_string(&file)?;
            let failed: Vec<_> = text.lines().filter(|line| !line.starts_with("0 ")).collect();
            total += text.lines().count();
            if let Some(first) = failed.first() {
                bail!(
                    "{}: {} of {} requests failed, first: {first}",
                    file.display(),
                    failed.len(),
                    text.lines().count()
                );
            }
        }
        log::line(format_args!("    {total} requests, 0 failed"));
        Ok(())
    }

    fn stop(self) -> Result<()> {
        self.0.iter().try_for_each(|(machine, client)| machine.stop(client, libc::SIGKILL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_those_of_the_section() {
        let page = "## A\n```sh\nno\n```\n## B\ntext\n\n   ```sh\n   a b\n   # Run it again.\n   c\n   ```\n```text\nno\n```\n## C\n";
        let line = |line: &str, is_retried| Command { line: line.to_owned(), is_retried };
        assert_eq!(commands(page, "## B").unwrap(), [line("a b", false), line("c", true)]);
        assert!(commands(page, "## D").is_err());
    }
}
