//! `cargo xtask test --kernel LINE`: tests the programs on a distribution's kernel under qemu, or on this machine's own kernel.
//!
//! This machine has only one kernel. Only older kernels show what they reject: a helper, a program too complex for their
//! verifier, TCX.

mod archive;
mod boot;
mod initramfs;
mod line;
mod package;
mod record;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use line::{Distribution, LINES, Line};
use record::{Found, Record};

use crate::cross::{self, Arch};
use crate::exec::{self, Cmd};
use crate::setup::{self, Need};
use crate::test::cargo::cargo_test;
use crate::workspace::{self, Workspace};
use crate::{build, log};

/// Name that selects this machine's own kernel.
const RUNNING: &str = "running";
/// File with the recorded costs of verification.
const RECORD: &str = "docs/verifier.md";
/// Packages for the initramfs of another architecture, besides our programs.
const USERLAND: [&str; 2] = ["busybox-static", "iproute2"];

/// Runs `netns --kernel-smoke` on a kernel, returns an error if it fails, and compares the costs of verification with the
/// recorded ones, or with `records` records them.
pub fn run(workspace: &Workspace, name: &str, arch: Arch, apt_root: &Path, records: bool) -> Result<()> {
    let programs = Programs::build(workspace, arch)?;
    let (name, release, console) = if name == RUNNING {
        if arch != Arch::HOST {
            bail!("this machine does not run {arch} kernels: name a line");
        }
        let release = Cmd::new("uname").arg("-r").read()?.trim().to_owned();
        let line = release.split('.').take(2).collect::<Vec<_>>().join(".");
        (line, release, programs.run_here()?)
    } else {
        let (release, console) = programs.boot(workspace, find(name)?, arch, apt_root)?;
        let name = if arch == Arch::X86 { name.to_owned() } else { format!("{name} {arch}") };
        (name, release, console)
    };
    let lines: Vec<_> = console.into_iter().filter(|line| line.contains(record::MARK)).collect();
    let found = Found::read(&name, &release, &lines)?;
    if found.is_empty() {
        log::line("    no program loaded: the kernel is too old, and the agent reports it");
        return Ok(());
    }
    let path = workspace.root().join(RECORD);
    let mut record = Record::open(&path)?;
    if !records && !record.knows(&found) {
        log::line(format_args!("    note: {RECORD} has no column for Linux {name}: --record writes it"));
        return Ok(());
    }
    if !records {
        return record.check(&found);
    }
    record.put(found);
    fs::write(&path, record.render()).with_context(|| format!("cannot write {}", path.display()))
}

fn find(name: &str) -> Result<&'static Line> {
    LINES.iter().find(|line| line.name == name).with_context(|| {
        let known: Vec<_> = LINES.iter().map(|line| line.name).chain([RUNNING]).collect();
        format!("no kernel {name}; there are {}", known.join(", "))
    })
}

/// The programs that run on the kernel.
struct Programs {
    agent: PathBuf,
    tests: PathBuf,
}

impl Programs {
    fn build(workspace: &Workspace, arch: Arch) -> Result<Self> {
        setup::tools(Need::Kernel)?;
        if arch == Arch::Arm {
            setup::tools(Need::Arm)?;
        }
        build::bpf(workspace, &build::Args::default())?;
        log::step("build the agent and the namespace tests");
        let mut cargo = cargo_test(workspace).args([
            "--test",
            "netns",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ]);
        let mut agent = workspace.binary(false);
        if arch != Arch::HOST {
            cross::prepare(arch)?;
            agent = workspace.target().join(arch.target()).join("debug/ballast");
            cargo = cross::cargo(cargo, workspace, arch);
        }
        let tests = executable(&cargo.read_with_stderr_shown()?)
            .context("cargo built no program for the namespace tests")?;
        Ok(Self { agent, tests })
    }

    /// Runs the tests on this machine and returns the lines of their output.
    fn run_here(&self) -> Result<Vec<String>> {
        if !exec::is_root() {
            bail!("needs root, to load programs and make network namespaces");
        }
        let mut tests = Cmd::new(&self.tests)
            .arg("--kernel-smoke")
            .env("BALLAST_BIN", &self.agent)
            .into_std()
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the tests")?;
        let output = tests.stdout.take().context("the tests have no output")?;
        let mut said = Vec::new();
        for line in BufReader::new(output).lines() {
            let line = line.context("cannot read the output of the tests")?;
            log::line(format_args!("    | {line}"));
            said.push(line);
        }
        let status = tests.wait().context("cannot wait for the tests")?;
        if !status.success() {
            bail!("the tests ended with {status}");
        }
        Ok(said)
    }

    /// Boots the newest kernel of a line; returns its release and the lines of the console.
    fn boot(
        &self,
        workspace: &Workspace,
        line: &Line,
        arch: Arch,
        apt_root: &Path,
    ) -> Result<(String, Vec<String>)> {
        let kernel = package::get(line, arch, apt_root)?;
        let image = workspace.target().join(format!("kernel-{}-{arch}.cpio", line.name));
        let contents = initramfs::Contents {
            strip: arch,
            base: (arch != Arch::HOST).then(|| userland(arch)).transpose()?,
            programs: vec![("ballast", self.agent.clone()), ("netns", self.tests.clone())],
            tools: ["ip", "tc"].into_iter().filter_map(exec::which).collect(),
            modules: kernel.modules()?,
        };
        initramfs::write(&image, &contents)?;
        let what = format!("Linux {} under qemu", kernel.release());
        let console = log::timed(&what, || boot::run(arch, kernel.image(), &image));
        // It is large, and the next run writes its own.
        fs::remove_file(&image).with_context(|| format!("cannot remove {}", image.display()))?;
        Ok((kernel.release().to_owned(), console?))
    }
}

/// Returns the directory with Debian's busybox, `ip` and C library of another architecture, unpacked into the cache. The C
/// library is that of the Debian release that the cross compiler is from.
fn userland(arch: Arch) -> Result<PathBuf> {
    let machine = archive::Machine::at(Path::new("/"))?;
    let suite = &*machine.suite;
    let dir = workspace::cache()?.join("userland").join(format!("{suite}-{}", arch.debian()));
    if dir.join("bin/sh").exists() {
        return Ok(dir);
    }
    let archive = archive::Archive::open(&machine, Distribution::Debian, &[suite], arch)?;
    // Merged /usr, as in every Debian release since 2023; packages use either path.
    let merged = r#"cd "$1" && mkdir -p usr/bin usr/sbin usr/lib && ln -sfn usr/bin bin && ln -sfn usr/sbin sbin && ln -sfn usr/lib lib"#;
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Cmd::new("sh").args(["-c", merged, "sh"]).arg(&dir).run()?;
    for package in archive.download_all(&USERLAND)? {
        // A shell is needed for the pipe.
        let script =
            r#"dpkg-deb --fsys-tarfile "$1" | tar -x -C "$2" --keep-directory-symlink --exclude ./usr/share"#;
        Cmd::new("sh").args(["-c", script, "sh"]).arg(&package).arg(&dir).run()?;
    }
    // Created last: its existence means that the directory is complete.
    Cmd::new("ln").args(["-sf", "busybox"]).arg(dir.join("bin/sh")).run()?;
    Ok(dir)
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
