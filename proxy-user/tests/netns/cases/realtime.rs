//! Kernels with `PREEMPT_RT`, under which a task may interrupt another one that processes a packet on the same CPU.

use std::net::{SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use proxy_user::programs::{attachments, interleaves_packets};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::exposed::{node_ip, open_up};
use super::{Case, NodesCase, WEB, smoke, vip};
use crate::fixture::{Fixture, Wish};
use crate::peer::SocketKind;
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 1, services: &[WEB], flags: &[] };

const SAFE: &[Case] =
    &[Case { name: "realtime::two_fifo_senders_on_one_cpu_are_answered", wish: WISH, run: two_senders }];

const UNSAFE: &[NodesCase] =
    &[NodesCase { name: "realtime::agent_starts_only_with_the_flag", run: only_with_the_flag }];

/// How long the senders exchange messages, for each family.
const LASTS: Duration = Duration::from_secs(10);
/// Exchanges of each sender: an emulated machine makes more than a hundred in a second.
const LEAST: usize = 200;
/// Timeout of an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns the cases for this kernel, if it is a `PREEMPT_RT` kernel on which the agent starts.
pub fn safe() -> &'static [Case] {
    let version = std::fs::read_to_string("/proc/sys/kernel/version").unwrap_or_default();
    if version.contains("PREEMPT_RT") && !interleaves_packets() { SAFE } else { &[] }
}

/// Returns the cases for this kernel, if the agent does not start on it.
pub fn refused() -> &'static [NodesCase] {
    if interleaves_packets() { UNSAFE } else { &[] }
}

fn only_with_the_flag() -> Result<()> {
    let fixture = Fixture::new(smoke::WISH)?;
    fixture.start()?;
    let log = fixture.take_agent()?.fails()?;
    let words = ["this kernel is PREEMPT_RT", "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK=y", "--allow-preempt-rt"];
    let lost = words.into_iter().find(|words| !log.contains(words));
    ensure!(lost.is_none(), "without {lost:?}: {log}");
    ensure!(attachments(&fixture.bpffs()).is_empty(), "something is attached");
    fixture.setup().flags.push("--allow-preempt-rt".to_owned());
    fixture.begin()?;
    smoke::works(&fixture)
}

/// Makes this thread a task of `SCHED_FIFO` on the first CPU.
fn prioritize(priority: libc::c_int) -> Result<()> {
    let mut first = CpuSet::new();
    first.set(0);
    sched_setaffinity(None, &first)?;
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: the kernel reads the parameter, which outlives the call.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) };
    ensure!(result == 0, "SCHED_FIFO: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Exchanges messages of this size; each answer has to come from the endpoint, about this message of this socket. Returns their
/// number.
fn exchange(to: SocketAddr, priority: libc::c_int, size: usize, pause: Duration) -> Result<usize> {
    prioritize(priority)?;
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    // The source port is one for SNAT.
    let family = Family::of(to.ip());
    let (start, end) = (format!("0/5353|{}", SocketAddr::from((node_ip(family), 0))), format!("|{size}"));
    let start = start.trim_end_matches('0');
    let (begun, message) = (Instant::now(), vec![b'x'; size]);
    for count in 0.. {
        if begun.elapsed() > LASTS {
            return Ok(count);
        }
        socket.send(&message)?;
        let mut answer = [0; 256];
        let length = socket.recv(&mut answer).with_context(|| format!("message {count} to {to}"))?;
        let answer = String::from_utf8_lossy(&answer[..length]);
        ensure!(answer.starts_with(start) && answer.ends_with(&end), "{answer} instead of {start}...{end}");
        thread::sleep(pause);
    }
    Ok(0)
}

/// Two processes of the node send by packets: the programs run in the tasks of the senders.
fn two_senders(fixture: &Fixture) -> Result<()> {
    // Packets of the node get the source address of its uplink.
    open_up(fixture)?;
    for family in Family::BOTH {
        let to = vip(family, WEB, SocketKind::Datagram);
        let counts = fixture.node.inside(|| {
            thread::scope(|scope| {
                // The one with the higher priority pauses, so that the other one runs in between.
                let low = scope.spawn(|| exchange(to, 1, 100, Duration::ZERO));
                let high = scope.spawn(|| exchange(to, 2, 200, Duration::from_millis(1)));
                let end = |thread: thread::ScopedJoinHandle<'_, Result<usize>>| {
                    thread.join().map_err(|_| anyhow!("a sender panicked"))?
                };
                Ok([end(low), end(high)])
            })
        })?;
        for count in counts {
            let count = count.with_context(|| format!("{family:?}"))?;
            ensure!(count > LEAST, "{family:?}: only {count} exchanges");
        }
    }
    Ok(())
}
