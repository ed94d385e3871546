//! Boots a kernel in qemu, prints its console and waits for the marker.

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{ChildStdout, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::cross::Arch;
use crate::exec::Cmd;
use crate::log;

/// Printed by the init script before the exit status of the tests.
const MARKER: &str = "ballast-kernel-test-status";

/// Time limit of a boot with its tests. Without hardware virtualization, a boot takes 5 s and the verifier is 20 times slower.
const LIMIT: Duration = Duration::from_mins(20);

/// Printed by the init script when the kernel has booted.
const BOOTED: &str = "booted:";

/// Time limit until [`BOOTED`]. On a busy machine, the emulated timer loses ticks; the kernel then hangs before the init script.
const BOOT_LIMIT: Duration = Duration::from_mins(3);
const BOOTS: usize = 3;

/// Outcome of a boot.
#[derive(Debug)]
enum End {
    /// The init script never started: an error of qemu, not of the tests.
    NotBooted,
    /// Exit status of the tests.
    Status(String),
}

/// Boots, prints the console's lines, and returns them. Returns an error unless the tests inside have passed.
pub fn run(arch: Arch, kernel: &Path, initramfs: &Path) -> Result<Vec<String>> {
    for _ in 0..BOOTS {
        let console = RefCell::new(Vec::new());
        match boot(arch, kernel, initramfs, &console)? {
            End::Status(status) => return verdict(&status).map(|()| console.into_inner()),
            End::NotBooted => log::line(format_args!("    no sign of life in {} s", BOOT_LIMIT.as_secs())),
        }
    }
    bail!("the kernel did not boot in {BOOTS} attempts")
}

fn boot(arch: Arch, kernel: &Path, initramfs: &Path, said: &RefCell<Vec<String>>) -> Result<End> {
    let (program, machine, console) = match arch {
        Arch::X86 => ("qemu-system-x86_64", ["-cpu", "max", "-vga", "none"], "ttyS0"),
        // Not `max`: emulation of its pointer authentication takes most of the time.
        Arch::Arm => ("qemu-system-aarch64", ["-cpu", "cortex-a76", "-machine", "virt"], "ttyAMA0"),
    };
    let mut qemu = Cmd::new(program)
        // Not KVM: some machines have none, and with an incomplete KVM qemu hangs.
        .args(["-accel", "tcg", "-smp", "2", "-m", "2048", "-nic", "none"])
        .args(machine)
        // Not -nographic: with it, the firmware also uses the console, with escape codes that clear a terminal.
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .args(["-no-reboot", "-kernel"])
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        // panic=-1: a panic ends qemu. mitigations=off: they cost time and change nothing here.
        .args(["-append", &format!("console={console} panic=-1 loglevel=4 mitigations=off no_timer_check")])
        .dies_with_us()
        .into_std()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let console = qemu.stdout.take().context("qemu has no console")?;
    let end = watch(&lines(console), Instant::now(), |line| {
        log::line(format_args!("    | {line}"));
        said.borrow_mut().push(line.to_owned());
    });
    // The machine powers off by itself after the tests; after a failure there is nothing to wait for.
    let _ = qemu.kill();
    qemu.wait().context("cannot wait for qemu")?;
    end
}

/// Returns the console's lines. A thread reads them, so that the receiver can wait with a time limit.
fn lines(console: ChildStdout) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

fn watch(lines: &mpsc::Receiver<String>, start: Instant, show: impl Fn(&str)) -> Result<End> {
    let mut booted = false;
    loop {
        let deadline = start + if booted { LIMIT } else { BOOT_LIMIT };
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                show(&line);
                booted |= line.contains(BOOTED);
                if let Some(status) = status(&line) {
                    return Ok(End::Status(status.to_owned()));
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) if !booted => return Ok(End::NotBooted),
            Err(mpsc::RecvTimeoutError::Timeout) => bail!("no result after {} min", LIMIT.as_secs() / 60),
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("qemu ended before the tests did"),
        }
    }
}

fn status(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix(MARKER).map(str::trim)
}

fn verdict(status: &str) -> Result<()> {
    match status {
        "0" => Ok(()),
        other => Err(anyhow!("the tests in the machine ended with status {other}")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn console(text: &[&str]) -> mpsc::Receiver<String> {
        let (sender, receiver) = mpsc::channel();
        for line in text {
            sender.send((*line).to_owned()).unwrap();
        }
        receiver
    }

    fn end(text: &[&str], start: Instant) -> Result<End> {
        watch(&console(text), start, |_| ())
    }

    #[test]
    fn only_a_marker_with_status_0_passes() {
        for (status, passes) in [("0", true), ("101", false), ("", false)] {
            let marker = format!("{MARKER} {status}");
            let End::Status(read) = end(&["booting", &marker], Instant::now()).unwrap() else {
                panic!("no status")
            };
            assert_eq!(verdict(&read).is_ok(), passes, "{status}");
        }
    }

    #[test]
    fn a_kernel_that_dies_fails() {
        let error = end(&["Kernel panic"], Instant::now()).unwrap_err();
        assert!(error.to_string().contains("ended"), "{error}");
    }

    #[test]
    fn a_hang_before_our_script_is_told_from_one_in_the_tests() {
        let (sender, receiver) = mpsc::channel();
        let long_ago = Instant::now().checked_sub(LIMIT).unwrap();
        assert!(matches!(watch(&receiver, long_ago, |_| ()), Ok(End::NotBooted)));
        sender.send(format!("{BOOTED} 6.1")).unwrap();
        assert!(watch(&receiver, long_ago, |_| ()).unwrap_err().to_string().contains("no result"));
    }

    /// Environment variable of the child process that the test below kills: the directory of its qemu.
    const CHILD: &str = "BALLAST_TEST_BOOT";

    #[test]
    fn qemu_ends_when_something_kills_us() {
        if let Some(dir) = std::env::var_os(CHILD) {
            let image = Path::new(&dir);
            let _ = run(Arch::X86, image, image);
            return;
        }
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
            let dir = tempfile::tempdir().unwrap();
            let (qemu, note) = (dir.path().join("qemu-system-x86_64"), dir.path().join("pid"));
            let script =
                format!("#!/bin/sh\necho $$ >{0}.new && mv {0}.new {0}\nexec sleep 60\n", note.display());
            std::fs::write(&qemu, script).unwrap();
            std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
            let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
            let mut us = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "kernel::boot::tests::qemu_ends_when_something_kills_us"])
                .env(CHILD, dir.path())
                .env("PATH", path)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let pid: i32 = eventually(|| std::fs::read_to_string(&note).ok()).trim().parse().unwrap();
            // SAFETY: a system call without pointers, to a child that has not been waited for.
            assert_eq!(unsafe { libc::kill(us.id().cast_signed(), signal) }, 0);
            us.wait().unwrap();
            // The process that reaps qemu may do so late; until then qemu is a zombie.
            let has_ended = || {
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
                stat.map_or(true, |stat| stat.contains(") Z ")).then_some(())
            };
            eventually(has_ended);
        }
    }

    fn eventually<T>(mut ask: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(answer) = ask() {
                return answer;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "it takes too long");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
