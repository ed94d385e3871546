//! `ballast check` on a node: before the installation, beside the agent, and with faults.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use proxy_user::programs::bpf::Link;
use serde_json::Value;

use super::{Case, WEB};
use crate::agent::{binary, command, confined, shipped_profile};
use crate::fixture::{Fixture, Wish};

const WISH: Wish = Wish { pods: 1, services: &[WEB], flags: crate::fixture::SMALL };

pub const CASES: &[Case] = &[
    Case { name: "check::faults_are_found_before_and_after_the_installation", wish: WISH, run: check },
    Case { name: "check::unusable_manifest_is_a_problem_until_it_is_fixed", wish: WISH, run: manifests },
];

/// Checks that `ballast status` and `ballast check` name bad manifests, and an annotation without a meaning.
fn manifests(fixture: &Fixture) -> Result<()> {
    let file = fixture.folder.dir().join("bad.yaml");
    let service = |annotation: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{ name: more, annotations: {{ {annotation}: random }} }}\n\
             spec: {{ clusterIP: 10.96.0.77, ports: [{{ port: 80 }}] }}\n"
        )
    };
    let bad = [
        ("kind: [\n".to_owned(), "bad.yaml is not used"),
        ("apiVersion: v1\nkind: Servce\nmetadata: { name: a }\n".to_owned(), "did you mean Service"),
        (service("ballast.io/algoritm"), "did you mean ballast.io/algorithm"),
    ];
    for (text, words) in bad {
        std::fs::write(&file, text)?;
        crate::fixture::eventually(crate::fixture::SOON, || {
            let status = command(&fixture.node, &["status"], &fixture.bpffs())?;
            let output = String::from_utf8_lossy(&status.stdout).into_owned();
            ensure!(!status.status.success() && output.contains(words), "no {words:?} in {output}");
            Ok(())
        })?;
        let (_, document) = ask(fixture, &["problems"], &fixture.bpffs())?;
        expect(&document, "problems", "warn", words)?;
    }
    std::fs::write(&file, service("ballast.io/algorithm"))?;
    crate::fixture::eventually(crate::fixture::SOON, || {
        let status = command(&fixture.node, &["status"], &fixture.bpffs())?;
        ensure!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
        Ok(())
    })
}

/// Runs `ballast check` on this bpffs; returns the exit status and the document.
fn ask(fixture: &Fixture, flags: &[&str], bpffs: &Path) -> Result<(Option<i32>, Value)> {
    let cgroup = fixture.cgroup().to_str().context("a strange path")?;
    let words = ["check", "-o", "json", "--no-api", "--cgroup-root", cgroup];
    let words: Vec<_> = words.iter().chain(flags).copied().collect();
    let output = command(&fixture.node, &words, bpffs)?;
    let value = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("no JSON: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok((output.status.code(), value))
}

/// Checks that a check has this outcome, and shows these words.
fn expect(document: &Value, check: &str, outcome: &str, words: &str) -> Result<()> {
    let checks = document["checks"].as_array().context("no checks")?;
    let found =
        checks.iter().find(|one| one["check"] == check).with_context(|| format!("no {check}: {document}"))?;
    let seen = found["seen"].as_str().unwrap_or_default();
    ensure!(
        found["outcome"] == outcome && seen.contains(words),
        "{check} should {outcome} with {words:?}: {found}"
    );
    Ok(())
}

fn check(fixture: &Fixture) -> Result<()> {
    let (bpffs, empty) = (fixture.bpffs(), fixture.bpffs().with_file_name("nothing"));
    std::fs::create_dir(&empty)?;

    // Before the installation: a folder without a bpffs causes a warning, and the checks of the agent are left out.
    let (code, before) = ask(fixture, &["--pre"], &empty)?;
    expect(&before, "bpffs", "warn", "no BPF file system")?;
    for check in ["kernel-version", "kernel-bpf", "cgroup2", "capabilities", "kube-proxy"] {
        expect(&before, check, "pass", "")?;
    }
    let is_of_agent = |one: &Value| one["group"] == "agent";
    ensure!(before["checks"].as_array().is_some_and(|all| !all.iter().any(is_of_agent)), "{before}");
    ensure!(code == Some(i32::from(before["ok"] != true)), "{code:?}: {before}");

    // After the installation: the agent of the fixture serves.
    let (_, after) = ask(fixture, &[], &bpffs)?;
    for check in
        ["bpffs", "agent", "socket-programs", "device-programs", "pins", "maps", "map-usage", "sync", "audit"]
    {
        expect(&after, check, "pass", "")?;
    }
    expect(&after, "agent-version", "pass", env!("CARGO_PKG_VERSION"))?;

    // Without its bpffs, the same command fails; with `--report-only`, it reports the failure and exits with 0.
    let (code, missing) = ask(fixture, &[], &empty)?;
    expect(&missing, "bpffs", "fail", "no BPF file system")?;
    expect(&missing, "maps", "fail", "no BPF file system is mounted")?;
    ensure!(code == Some(1) && missing["ok"] == false, "{code:?}: {missing}");
    let (code, reported) = ask(fixture, &["--report-only"], &empty)?;
    ensure!(code == Some(0) && reported["ok"] == false, "{code:?}: {reported}");

    // In a container behind the seccomp profile that the project ships.
    let filter = shipped_profile()?;
    let words = ["check", "--no-api", "--report-only", "-o", "short"];
    let output = confined(&fixture.node, &words, &bpffs, &filter)?;
    ensure!(output.status.success(), "{output:?}");

    // Without an agent, nothing is repaired.
    fixture.kill()?;
    let links = bpffs.join("ballast/links");
    std::fs::remove_file(links.join("sock_connect4"))?;
    let ingress = super::repair::links(fixture)?
        .into_iter()
        .find(|path| path.to_string_lossy().contains("tcx_ingress"));
    if let Some(path) = &ingress {
        Link::pinned(path)?.context("no link")?.detach()?;
    }
    let (code, broken) = ask(fixture, &[], &bpffs)?;
    expect(&broken, "agent", "fail", "does not answer")?;
    expect(&broken, "socket-programs", "fail", "sock_connect4")?;
    if ingress.is_some() {
        expect(&broken, "device-programs", "fail", "ingress")?;
    }
    expect(&broken, "maps", "pass", "pinned")?;
    ensure!(code == Some(1), "{code:?}");

    // In a pipe, people get signs but no colour; a wrong flag has an exit status of its own.
    let text = command(&fixture.node, &["check", "--no-api"], &bpffs)?;
    let text = String::from_utf8(text.stdout)?;
    ensure!(text.contains("× socket-programs") && !text.contains('\u{1b}'), "{text}");
    let wrong = fixture.node.command(binary()).args(["check", "--nonsense"]).output()?;
    ensure!(wrong.status.code() == Some(2), "{wrong:?}");
    Ok(())
}
