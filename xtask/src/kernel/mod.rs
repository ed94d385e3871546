//! `cargo xtask test --kernel VERSION`: the programs on a distribution's kernel, under qemu.
//!
//! A machine of ours has one kernel; what older ones refuse (a helper, a verifier's patience, TCX) shows only there.

mod boot;
mod initramfs;
mod package;

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::exec;
use crate::setup::{self, Need};
use crate::test::cargo_test;
use crate::workspace::Workspace;
use crate::{build, say};

/// Boots the newest Debian kernel of that line, runs `netns --kernel-smoke` there, and fails as it does.
pub fn run(workspace: &Workspace, version: &str) -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("only x86_64 kernels are booted so far");
    }
    setup::tools(Need::Kernel)?;
    build::bpf(workspace, &build::Args::default())?;
    let tests = test_binary(workspace)?;
    let kernel = package::get(version)?;
    let image = workspace.target().join(format!("kernel-{version}.cpio"));
    let contents = initramfs::Contents {
        programs: vec![("ballast", workspace.binary(false)), ("netns", tests)],
        tools: ["ip", "tc", "bpftool"].into_iter().filter_map(exec::which).collect(),
        modules: kernel.modules()?,
    };
    initramfs::write(&image, &contents)?;
    let what = format!("Linux {} under qemu", kernel.release());
    say::timed(&what, || boot::run(kernel.image(), &image))
}

/// Builds the namespace tests, and the agent with them, and returns their program.
fn test_binary(workspace: &Workspace) -> Result<PathBuf> {
    say::step("build the agent and the namespace tests");
    let messages = cargo_test(workspace)
        .args(["--test", "netns", "--no-run", "--message-format=json-render-diagnostics"])
        .read_aside()?;
    executable(&messages).context("cargo built no program for the namespace tests")
}

fn executable(messages: &str) -> Option<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        executable: Option<PathBuf>,
        target: Option<Target>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Message>(line).ok());
    let mut named =
        messages.filter(|message| message.target.as_ref().is_some_and(|target| target.name == "netns"));
    named.find_map(|message| message.executable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_program_is_found_among_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"ballast"},"executable":"/t/ballast"}"#,
            "\nnot json\n",
            r#"{"reason":"compiler-artifact","target":{"name":"netns"},"executable":"/t/netns-1"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        assert_eq!(executable(messages), Some("/t/netns-1".into()));
    }
}
