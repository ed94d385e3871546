//! `cargo xtask test --kernel LINE`: tests the programs on a distribution's kernel under qemu, or on this machine's own kernel.
//!
//! This machine has only one kernel. Only older kernels show what they reject: a helper, a program too complex for their
//! verifier, TCX.

mod boot;
pub mod devices;
mod record;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use fs_err as fs;
use serde::Deserialize;

use record::{Found, Record};

use crate::cross::{self, Arch};
use crate::exec::{self, Cmd};
use crate::setup::{self, Need};
use crate::workspace::{self, Workspace};
use crate::{build, log};

/// Path of the script that tests network devices, in the repository.
const DEVICES_SCRIPT: &str = "xtask/tools/devices.sh";
/// Name that selects this machine's own kernel.
const RUNNING: &str = "running";
/// File with the recorded costs of verification.
const RECORD: &str = "docs/verifier.md";

/// Runs `netns --kernel-smoke` on a kernel, returns an error if it fails, and compares the costs of verification with the
/// recorded ones, or with `records` records them.
pub fn run(workspace: &Workspace, name: &str, arch: Arch, apt_root: &Path, records: bool) -> Result<()> {
    // The verifier of a kernel with PREEMPT_RT is that of its line.
    let plain = name.strip_suffix("-rt").unwrap_or(name);
    if records && plain != name {
        bail!("{RECORD} has no column for {name}: --kernel {plain} --record writes that of its verifier");
    }
    let programs = Programs::build(workspace, arch)?;
    let (name, release, console) = if name == RUNNING {
        if arch != Arch::HOST {
            bail!("this machine does not run {arch} kernels: name a line");
        }
        let release = Cmd::new("uname").arg("-r").read()?.trim().to_owned();
        let line = release.split('.').take(2).collect::<Vec<_>>().join(".");
        (line, release, programs.run_here()?)
    } else {
        let (release, console) = programs.boot(workspace, name, arch, apt_root, None)?;
        let name = if arch == Arch::X86 { plain.to_owned() } else { format!("{plain} {arch}") };
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
    Ok(fs::write(&path, record.render())?)
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
        let mut cargo = workspace.cargo_test().args([
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
        exec::require_root("load programs and make network namespaces", "test --kernel running")?;
        // To open /dev/stderr again would truncate a log file.
        let tests = r#""$0" --kernel-smoke | tee >(cat >&2)"#;
        let said = Cmd::new("bash")
            .args(["-o", "pipefail", "-c", tests])
            .arg(&self.tests)
            .env("BALLAST_BIN", &self.agent)
            .read_with_stderr_shown()?;
        Ok(said.lines().map(str::to_owned).collect())
    }

    /// Boots the newest kernel of a line; returns its release and the lines of the console. With `devices`, it has NICs, and runs
    /// the script of [`devices`] with these arguments, one per line.
    fn boot(
        &self,
        workspace: &Workspace,
        line: &str,
        arch: Arch,
        root: &Path,
        devices: Option<&str>,
    ) -> Result<(String, Vec<String>)> {
        let initramfs = workspace.target().join(format!("kernel-{line}-{arch}.cpio"));
        let mut script = Cmd::new(workspace.root().join("xtask/tools/kernel.sh"))
            .args([line, &arch.to_string()])
            .args([root, &workspace::cache()?, &self.agent, &self.tests, &initramfs])
            .env("STRIP", cross::tool(arch, "strip"));
        if let Some(devices) = devices {
            script =
                script.env("DEVICES", workspace.root().join(DEVICES_SCRIPT)).env("DEVICES_WANTED", devices);
        }
        let told = script.read_with_stderr_shown()?;
        let (image, release) = told.trim().split_once('\n').context("kernel.sh names no kernel")?;
        let what = format!("Linux {release} under qemu");
        let console = log::timed(&what, || boot::run(arch, Path::new(image), &initramfs, devices.is_some()));
        // It is large, and the next run writes its own.
        fs::remove_file(&initramfs)?;
        Ok((release.to_owned(), console?))
    }
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

    /// Calls functions of kernel.sh.
    fn kernel_sh(script: &str) -> String {
        try_kernel_sh(script).unwrap()
    }

    fn try_kernel_sh(script: &str) -> Result<String> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/kernel.sh");
        Cmd::new("bash").args(["-c", &format!(". {path}; {script}")]).read()
    }

    #[test]
    fn the_newest_plain_kernel_of_the_line_is_taken() {
        let names = "linux-image-6.1.0-9-amd64 linux-image-6.1.0-56-amd64 linux-image-6.1.0-57-cloud-amd64 \
                     linux-image-6.1.0-58-amd64-dbg linux-image-6.1.0-58-amd64-unsigned linux-image-6.1.0-58-rt-amd64 \
                     linux-image-6.12.117+deb12-amd64 linux-image-6.12-amd64 linux-image-amd64 linux-image-6.1.0-59-arm64 \
                     linux-image-5.15.0-9-generic linux-image-5.15.0-204-generic linux-image-generic-5.15";
        let newest = |line, arch| {
            kernel_sh(&format!("line {line}; printf '%s\n' {names} | newest {arch}")).trim().to_owned()
        };
        assert_eq!(newest("6.1", "amd64"), "linux-image-6.1.0-56-amd64");
        assert_eq!(newest("6.1", "arm64"), "linux-image-6.1.0-59-arm64");
        assert_eq!(newest("sid", "amd64"), "linux-image-6.12.117+deb12-amd64");
        assert_eq!(newest("5.15", "amd64"), "linux-image-5.15.0-204-generic");
        assert_eq!(newest("5.10", "amd64"), "");
        assert_eq!(newest("6.1-rt", "amd64"), "linux-image-6.1.0-58-rt-amd64");
        assert!(try_kernel_sh("line 5.15-rt").is_err());
    }

    #[test]
    fn a_module_comes_after_those_it_needs_and_once() {
        let order = kernel_sh(
            r"printf 'a/stp.ko: a/llc.ko\na/llc.ko:\na/bridge.ko.xz: a/stp.ko a/llc.ko\n' | load_order 'bridge stp absent'",
        );
        assert_eq!(order, "a/llc.ko\na/stp.ko\na/bridge.ko.xz\n");
    }

    #[test]
    fn a_damaged_package_is_an_error_and_a_pattern_without_files_is_not() {
        if !crate::apt::exists() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let build = "mkdir -p content/DEBIAN content/boot content/doc kernel
            printf 'Package: p\nVersion: 1\nArchitecture: all\nMaintainer: m <m@example.com>\nDescription: d\n' >content/DEBIAN/control
            head -c 100000 /dev/urandom >content/boot/vmlinuz-1
            touch content/doc/readme
            dpkg-deb --build content p.deb >&2
            kernel=kernel";
        let found = kernel_sh(&format!("cd {path}; {build}; unpack p.deb; ls kernel kernel/boot"));
        assert!(found.contains("vmlinuz-1") && !found.contains("doc"), "{found}");
        let damaged =
            try_kernel_sh(&format!("cd {path}; kernel=kernel; truncate --size=50000 p.deb; unpack p.deb"));
        assert!(damaged.is_err());
    }

    #[test]
    fn another_suite_comes_from_the_machines_own_mirrors() {
        if !crate::apt::exists() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        for folder in ["etc/apt", "usr/share/keyrings"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let keys = root.path().join("usr/share/keyrings/ubuntu-archive-keyring.gpg");
        fs::write(&keys, "").unwrap();
        fs::write(root.path().join("etc/os-release"), "ID=ubuntu\nVERSION_CODENAME=\"noble\"\n").unwrap();
        let there = "deb http://mirror.test/ubuntu stable main\ndeb mirror+file:/etc/mirrors noble main\n\
                     deb http://safe.test/ubuntu noble-security main\n";
        fs::write(root.path().join("etc/apt/sources.list"), there).unwrap();
        let (root, keys) = (root.path().display(), keys.display());
        let told = kernel_sh(&format!("line 5.15; sources {root} arm64 jammy jammy-security jammy-updates"));
        let of = format!("deb [arch=arm64 signed-by={keys}]");
        let expected = format!(
            "{of} mirror+file:{root}/etc/mirrors/ jammy main\n{of} http://safe.test/ubuntu/ jammy-security main\n"
        );
        assert_eq!(told, expected);
    }
}
