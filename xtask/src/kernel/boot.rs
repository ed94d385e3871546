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

/// The same with NICs: the script tests more than 30 kinds of devices.
const LONG_LIMIT: Duration = Duration::from_mins(90);

/// Runs qemu in a network namespace, in which a bridge connects its NICs: three of each kind, those of virtio with two queues.
/// A kind that this qemu lacks is left out.
const WITH_NICS: &str = r#"
ip link add br0 type bridge
ip link set br0 up
number=0
for kind in virtio-net-pci,mq=on,vectors=8 vmxnet3 igb e1000e; do
    "$0" -device help 2>/dev/null | grep -q "name \"${kind%%,*}\"" || continue
    for _ in 1 2 3; do
        number=$((number + 1)) queues=1 multi=
        case $kind in virtio*) queues=2 multi=multi_queue ;; esac
        ip tuntap add tap$number mode tap $multi
        ip link set tap$number master br0 up
        set -- "$@" -netdev tap,id=n$number,ifname=tap$number,script=no,downscript=no,queues=$queues \
            -device $kind,netdev=n$number,mac=02:00:00:00:01:$(printf %02x $number)
    done
done
exec "$0" "$@""#;

/// Printed by the init script when the kernel has booted.
const BOOTED: &str = "booted:";

/// Time limit until [`BOOTED`]. On a busy machine, the emulated timer loses ticks; the kernel then hangs before the init script.
/// Seldom, it panics there (`Oops: int3`): an emulated CPU runs an instruction that another one has already patched back.
const BOOT_LIMIT: Duration = Duration::from_mins(3);
const BOOTS: usize = 3;

/// Outcome of a boot.
#[derive(Debug)]
enum End {
    /// The init script never started: an error of qemu, not of the tests. Contains the reason.
    NotBooted(String),
    /// Exit status of the tests.
    Status(String),
}

/// Boots, prints the console's lines, and returns them. Returns an error unless the tests inside have passed.
/// With `nics`, it has NICs ([`WITH_NICS`]), and more time.
pub fn run(arch: Arch, kernel: &Path, initramfs: &Path, nics: bool) -> Result<Vec<String>> {
    for _ in 0..BOOTS {
        let console = RefCell::new(Vec::new());
        match boot(arch, kernel, initramfs, nics, &console)? {
            End::Status(status) => return verdict(&status).map(|()| console.into_inner()),
            End::NotBooted(reason) => log::line(format_args!("    not booted: {reason}")),
        }
    }
    bail!("the kernel did not boot in {BOOTS} attempts")
}

fn boot(arch: Arch, kernel: &Path, initramfs: &Path, nics: bool, said: &RefCell<Vec<String>>) -> Result<End> {
    let (program, machine, console) = match arch {
        Arch::X86 => ("qemu-system-x86_64", ["-cpu", "max", "-vga", "none"], "ttyS0"),
        // Not `max`: emulation of its pointer authentication takes most of the time.
        Arch::Arm => ("qemu-system-aarch64", ["-cpu", "cortex-a76", "-machine", "virt"], "ttyAMA0"),
    };
    // The kernel kills it when we end, for whatever reason.
    let qemu = Cmd::new("setpriv").args(["--pdeathsig", "KILL"]);
    let qemu = if nics { qemu.args(["unshare", "--net", "sh", "-ec", WITH_NICS]) } else { qemu };
    let mut qemu = qemu
        .arg(program)
        // Not KVM: some machines have none, and with an incomplete KVM qemu hangs.
        .args(["-accel", "tcg", "-smp", "2", "-m", "2048"])
        .args(if nics { &[][..] } else { &["-nic", "none"] })
        .args(machine)
        // Not -nographic: with it, the firmware also uses the console, with escape codes that clear a terminal.
        .args(["-display", "none", "-monitor", "none", "-serial", "stdio"])
        .args(["-no-reboot", "-kernel"])
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        // panic=-1: a panic ends qemu. mitigations=off: they cost time and change nothing here.
        .args(["-append", &format!("console={console} panic=-1 loglevel=4 mitigations=off no_timer_check")])
        .into_std()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    let console = qemu.stdout.take().context("qemu has no console")?;
    let end = watch(&lines(console), Instant::now(), if nics { LONG_LIMIT } else { LIMIT }, |line| {
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

fn watch(
    lines: &mpsc::Receiver<String>,
    start: Instant,
    limit: Duration,
    show: impl Fn(&str),
) -> Result<End> {
    let (mut booted, mut panicked) = (false, false);
    loop {
        let deadline = start + if booted { limit } else { BOOT_LIMIT };
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                show(&line);
                booted |= line.contains(BOOTED);
                panicked |= line.contains("Kernel panic");
                if let Some(status) = status(&line) {
                    return Ok(End::Status(status.to_owned()));
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) if !booted => {
                return Ok(End::NotBooted(format!("no sign of life in {} s", BOOT_LIMIT.as_secs())));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => bail!("no result after {} min", limit.as_secs() / 60),
            Err(mpsc::RecvTimeoutError::Disconnected) if panicked && !booted => {
                return Ok(End::NotBooted("a panic".to_owned()));
            }
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

    fn end(text: &[&str], start: Instant) -> Result<End> {
        watch(&console(text), start, LIMIT, |_| ())
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
    fn a_hang_before_our_script_is_told_from_one_in_the_tests() {
        let (sender, receiver) = mpsc::channel();
        let long_ago = Instant::now().checked_sub(LIMIT).unwrap();
        assert!(matches!(watch(&receiver, long_ago, LIMIT, |_| ()), Ok(End::NotBooted(_))));
        sender.send(format!("{BOOTED} 6.1")).unwrap();
        assert!(watch(&receiver, long_ago, LIMIT, |_| ()).unwrap_err().to_string().contains("no result"));
    }

    #[test]
    fn a_panic_before_our_script_is_told_from_one_in_the_tests() {
        let panic = "Kernel panic - not syncing: Fatal exception in interrupt";
        assert!(matches!(end(&["Oops: int3", panic], Instant::now()), Ok(End::NotBooted(_))));
        let booted = format!("{BOOTED} 6.1");
        for console in [&[&*booted, panic][..], &["qemu-system-x86_64: no such device"]] {
            let error = end(console, Instant::now()).unwrap_err().to_string();
            assert!(error.contains("qemu ended"), "{console:?}: {error}");
        }
    }
}
