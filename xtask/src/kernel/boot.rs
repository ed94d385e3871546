//! qemu: boots, shows the console, waits for the marker.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{ChildStdout, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::exec::Cmd;
use crate::say;

/// What the init script prints before the tests' exit status.
pub const MARKER: &str = "ballast-kernel-test-status";

/// Without hardware help a boot takes 5 s and the verifier is 20 times slower than usual.
const LIMIT: Duration = Duration::from_mins(10);

/// Boots, shows what the console says, and fails unless the tests inside passed.
pub fn run(kernel: &Path, initramfs: &Path) -> Result<()> {
    let mut qemu = Cmd::new("qemu-system-x86_64")
        // Not KVM: it is not everywhere, and where it is half there, it hangs.
        .args(["-accel", "tcg", "-cpu", "max", "-smp", "2", "-m", "2048", "-nic", "none"])
        .args(["-nographic", "-no-reboot", "-kernel"])
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        // A panic ends qemu; mitigations cost time and change nothing here.
        .args(["-append", "console=ttyS0 panic=-1 loglevel=4 mitigations=off"])
        .into_std()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start qemu-system-x86_64")?;
    let console = qemu.stdout.take().context("qemu has no console")?;
    let verdict =
        watch(&lines(console), Instant::now() + LIMIT, |line| say::line(format_args!("    | {line}")));
    // It powers off by itself; after a failure there is nothing to wait for.
    let _ = qemu.kill();
    qemu.wait().context("cannot wait for qemu")?;
    verdict
}

/// The console's lines, read by a thread so that waiting for one can have a limit.
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

fn watch(lines: &mpsc::Receiver<String>, deadline: Instant, show: impl Fn(&str)) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => {
                show(&line);
                if let Some(status) = status(&line) {
                    return verdict(status);
                }
            }
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
    use super::*;

    fn console(text: &[&str]) -> mpsc::Receiver<String> {
        let (sender, receiver) = mpsc::channel();
        for line in text {
            sender.send((*line).to_owned()).unwrap();
        }
        receiver
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn only_a_marker_with_status_0_passes() {
        let marker = |status: &str| format!("{MARKER} {status}");
        watch(&console(&["booting", &marker("0")]), soon(), |_| ()).unwrap();
        assert!(watch(&console(&["booting", &marker("101")]), soon(), |_| ()).is_err());
        assert!(watch(&console(&["booting", &marker("")]), soon(), |_| ()).is_err());
    }

    #[test]
    fn a_kernel_that_dies_or_hangs_fails() {
        assert!(
            watch(&console(&["Kernel panic"]), soon(), |_| ()).unwrap_err().to_string().contains("ended")
        );
        let (_sender, receiver) = mpsc::channel();
        assert!(watch(&receiver, Instant::now(), |_| ()).unwrap_err().to_string().contains("no result"));
    }
}
