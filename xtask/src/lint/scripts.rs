//! Checks files that are not Rust but also run on a node: shell scripts and systemd units.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use fs_err as fs;

use super::source::SourceFile;
use crate::exec::{self, Cmd};
use crate::log;
use crate::setup::{self, Need};
use crate::workspace::Workspace;

/// Path of the program in the units; the machine that checks them does not have this file.
const INSTALLED: &str = "/usr/local/bin/ballast";

/// Checks all scripts with shellcheck, and all units with `systemd-analyze verify`.
pub(super) fn check(workspace: &Workspace, files: &[SourceFile]) -> Result<()> {
    if let Err(error) = setup::tools(Need::Lint) {
        if exec::in_ci() {
            return Err(error);
        }
        log::line(format_args!("    scripts and units are not checked: {error:#}"));
        return Ok(());
    }
    let scripts: Vec<_> = files.iter().filter(|file| is_script(file)).map(|file| &file.path).collect();
    ensure!(!scripts.is_empty(), "no shell scripts found");
    Cmd::new("shellcheck").args(scripts).dir(workspace.root()).run()?;
    let is_unit = |file: &&SourceFile| file.path.extension().is_some_and(|ext| ext == "service");
    verify(files.iter().filter(is_unit))
}

fn is_script(file: &SourceFile) -> bool {
    let first = file.text.lines().next().unwrap_or_default();
    first.starts_with("#!") && (first.ends_with("/sh") || first.ends_with("bash"))
}

/// Verifies copies of the units in a temporary folder. An unknown key, for systemd only a warning, is an error here.
fn verify<'a>(units: impl Iterator<Item = &'a SourceFile>) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("ballast-units-{}", std::process::id()));
    fs::create_dir(&folder)?;
    let verified = verify_in(&folder, units);
    fs::remove_dir_all(&folder)?;
    verified
}

fn verify_in<'a>(folder: &Path, units: impl Iterator<Item = &'a SourceFile>) -> Result<()> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for unit in units {
        let path = folder.join(unit.path.file_name().context("a unit without a name")?);
        fs::write(&path, unit.text.replace(INSTALLED, "/bin/true"))?;
        paths.push(path);
    }
    ensure!(!paths.is_empty(), "no units found");
    let output = Cmd::new("systemd-analyze").arg("verify").args(&paths).into_std().output();
    let output = output.context("cannot start systemd-analyze")?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() || !said.trim().is_empty() {
        bail!("systemd-analyze verify: {}", said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_script_is_known_by_its_first_line() {
        for first in ["#!/bin/sh", "#!/usr/bin/env bash", "#!/bin/bash"] {
            assert!(is_script(&file("run", &format!("{first}\nset -eu\n"))));
        }
        assert!(!is_script(&file("run.rs", "#![expect(x)]\n")));
        assert!(!is_script(&file("run.py", "#!/usr/bin/python3\n")));
    }

    /// A copy of the files of `deploy/systemd` whose script takes a folder for the root of the machine, and has no systemd.
    struct Machine {
        root: tempfile::TempDir,
    }

    impl Machine {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let there = root.path().display();
            for name in ["install.sh", "ballast.service", "ballast-end-udp-sockets.service"] {
                let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/systemd/");
                let text = fs::read_to_string(format!("{from}{name}")).unwrap();
                let text = text
                    .replace("$dest/", &format!("{there}/"))
                    .replace("/run/systemd", &format!("{there}/run/systemd"))
                    .replace("$(id -u)", "0");
                fs::write(root.path().join(name), text).unwrap();
            }
            let machine = Self { root };
            fs::create_dir_all(machine.path("usr/local/bin")).unwrap();
            fs::create_dir_all(machine.path("etc/ballast")).unwrap();
            executable(
                &machine.path("usr/local/bin/ballast"),
                "#!/bin/sh\necho \"$*|$BALLAST_BPFFS|$BALLAST_CGROUP_ROOT\"\n",
            );
            machine
        }

        fn path(&self, below: &str) -> PathBuf {
            self.root.path().join(below)
        }

        /// Runs the script, and returns whether it succeeded, and what it and the program printed.
        fn install(&self, words: &[&str]) -> (bool, String) {
            let mut command = std::process::Command::new("/bin/sh");
            command.arg(self.path("install.sh")).args(words);
            for name in ["DESTDIR", "BALLAST_BPFFS", "BALLAST_CGROUP_ROOT"] {
                command.env_remove(name);
            }
            let output = command.output().unwrap();
            let printed = [output.stdout, output.stderr].concat();
            (output.status.success(), String::from_utf8(printed).unwrap())
        }
    }

    fn executable(path: &Path, text: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        fs::write(path, text).unwrap();
        fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn an_uninstall_cleans_the_folders_of_the_agents_settings() {
        for (environment, call) in [
            ("", "cleanup --yes||"),
            ("BALLAST_UPLINKS=eth0 false\nBALLAST_BPFFS=/run/own\n", "cleanup --yes|/run/own|"),
            (
                "BALLAST_BPFFS=\"/run/a b\"\n#BALLAST_BPFFS=/no\nBALLAST_CGROUP_ROOT=/c \n",
                "cleanup --yes|/run/a b|/c\n",
            ),
        ] {
            let machine = Machine::new();
            fs::write(machine.path("etc/ballast/environment"), environment).unwrap();
            let (is_done, printed) = machine.install(&["--uninstall"]);
            assert!(is_done && printed.contains(call), "{environment}: {printed}");
            assert!(!machine.path("usr/local/bin/ballast").exists());
        }
    }

    #[test]
    fn the_installed_program_is_kept_when_it_is_given() {
        let machine = Machine::new();
        let program = machine.path("usr/local/bin/ballast").display().to_string();
        let kubeconfig = machine.path("install.sh").display().to_string();
        let (is_done, printed) =
            machine.install(&[&program, "--kubeconfig", &kubeconfig, "--end-udp-sockets"]);
        assert!(is_done, "{printed}");
        for unit in ["ballast.service", "ballast-end-udp-sockets.service"] {
            assert!(machine.path("etc/systemd/system").join(unit).exists(), "{unit}");
        }
    }

    /// Runs the script with fakes that print how they are called.
    #[test]
    fn the_kind_script_leaves_the_runtime_to_kind_and_waits_for_all_agents() {
        use std::os::unix::fs::PermissionsExt as _;
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kind/up.sh");
        let folder = tempfile::tempdir().unwrap();
        // `docker` may be another program with that name, like podman's.
        for program in ["docker", "kind", "kubectl", "helm"] {
            let file = folder.path().join(program);
            let text = "#!/bin/bash\necho \"${KIND_EXPERIMENTAL_PROVIDER-kind chooses}: ${0##*/} $*\"\n";
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs_err::os::unix::fs::symlink("/usr/bin/dirname", folder.path().join("dirname")).unwrap();
        let run = |words: &[&str]| {
            let mut command = std::process::Command::new("/bin/bash");
            command.arg(script).args(words).env("PATH", folder.path());
            let output = command.env_remove("KIND_EXPERIMENTAL_PROVIDER").output().unwrap();
            (output.status.success(), String::from_utf8(output.stdout).unwrap())
        };
        assert_eq!(run(&["--down"]), (true, "kind chooses: kind delete cluster --name ballast\n".to_owned()));
        let (is_done, printed) = run(&["--archive", "a.tar"]);
        assert!(is_done, "{printed}");
        assert!(printed.contains("kind chooses: kind create cluster --name ballast"), "{printed}");
        assert!(printed.contains("rollout status daemonset/ballast "), "{printed}");
        fs::remove_file(folder.path().join("helm")).unwrap();
        assert_eq!(run(&["--down"]), (false, String::new()));
    }
}
