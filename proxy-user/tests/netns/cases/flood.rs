//! Many packets while endpoints change.

use std::io::Write as _;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::{Case, udp};
use crate::fixture::{Fixture, SMALL, SOON, Wish, eventually};
use proxy_testbed::Family;
use proxy_testbed::manifest::{Service, cluster_ip, pod_ip};

/// A port on which no server of the fixture listens.
const PORT: u16 = 7777;
const SET: Service = Service { name: "flood", number: 60, ports: &[udp(53, PORT, &[0, 1])] };
const WITHOUT: Service = Service { ports: &[udp(53, PORT, &[0])], ..SET };
const OTHER: Service = Service { name: "other", number: 61, ports: &[udp(53, PORT, &[2])] };
const WISH: Wish = Wish { pods: 3, services: &[SET, OTHER], flags: SMALL };

pub const CASES: &[Case] =
    &[Case { name: "flood::no_datagram_is_lost_while_an_endpoint_leaves", wish: WISH, run: flood }];

/// Number of datagrams in each family, at least and at most.
const COUNTS: [u64; 2] = [100_000, 1_000_000];
/// Number of sockets that send, which is also the number of flows.
const SOCKETS: u64 = 32;
/// Maximum number of datagrams in transit, so that a lost datagram was lost by a program and not by a full queue.
const WINDOW: u64 = 128;
/// Number of the datagram at which the endpoint is removed.
const LEAVES: u64 = COUNTS[0] / 2;
/// Number of datagrams that are sent after the last one to the removed endpoint.
const AFTER: u64 = 1000;

/// What one endpoint has received.
#[derive(Default)]
struct Sink {
    count: AtomicU64,
    /// The highest number that arrived.
    last: AtomicU64,
}

fn receive(socket: &UdpSocket, sink: &Sink, all: &AtomicU64, is_over: &AtomicBool) {
    let mut datagram = [0; 64];
    while !is_over.load(Ordering::Relaxed) {
        let Ok(length) = socket.recv(&mut datagram) else { continue };
        if let Some(number) = datagram[..length].first_chunk() {
            sink.last.fetch_max(u64::from_be_bytes(*number), Ordering::Relaxed);
        }
        sink.count.fetch_add(1, Ordering::Relaxed);
        all.fetch_add(1, Ordering::Relaxed);
    }
}

pub(super) fn sink(fixture: &Fixture, pod: u8, addr: SocketAddr) -> Result<UdpSocket> {
    let socket = fixture.in_pod(pod, || Ok(UdpSocket::bind(addr)?))?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let size: libc::c_int = 8 << 20;
    // SAFETY: the kernel reads the value, which outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUFFORCE,
            (&raw const size).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    ensure!(result == 0, "SO_RCVBUFFORCE: {}", std::io::Error::last_os_error());
    Ok(socket)
}

fn flood(fixture: &Fixture) -> Result<()> {
    for family in Family::BOTH {
        let to: SocketAddr = (cluster_ip(family, SET.number), 53).into();
        fixture.folder.put(SET)?;
        let (all, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let sinks: Vec<Arc<Sink>> = (0..3).map(|_| Arc::default()).collect();
        let mut threads = Vec::new();
        for (pod, sink_of) in (0u8..).zip(&sinks) {
            let socket = sink(fixture, pod, (pod_ip(family, pod), PORT).into())?;
            let (sink, all, is_over) = (Arc::clone(sink_of), Arc::clone(&all), Arc::clone(&is_over));
            threads.push(std::thread::spawn(move || receive(&socket, &sink, &all, &is_over)));
        }
        let open = || {
            (0..SOCKETS)
                .map(|_| {
                    let any = if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" };
                    let socket = UdpSocket::bind(any)?;
                    socket.connect(to)?;
                    Ok(socket)
                })
                .collect::<Result<Vec<_>>>()
        };
        let sockets = fixture.client_space.inside(open)?;
        // Wait until both endpoints serve.
        eventually(SOON, || {
            let probe = fixture.client_space.inside(|| {
                let socket = UdpSocket::bind(if family == Family::V4 { "0.0.0.0:0" } else { "[::]:0" })?;
                Ok(socket.send_to(&u64::MIN.to_be_bytes(), to)?)
            })?;
            ensure!(
                probe == 8 && sinks[..2].iter().all(|sink| sink.count.load(Ordering::Relaxed) > 0),
                "not yet"
            );
            Ok(())
        })?;
        std::thread::sleep(Duration::from_millis(200));
        let before: Vec<u64> = sinks.iter().map(|sink| sink.count.swap(0, Ordering::Relaxed)).collect();
        all.store(0, Ordering::Relaxed);
        let (mut lost, mut count) = (0, 0);
        // On a slow machine, the change takes longer.
        let is_enough = |count| count >= COUNTS[0] && sinks[1].last.load(Ordering::Relaxed) + AFTER < count;
        while count < COUNTS[1] && !is_enough(count) {
            let number = count;
            count += 1;
            if number == LEAVES {
                fixture.folder.put(WITHOUT)?;
            }
            let stuck = Instant::now();
            while number.saturating_sub(all.load(Ordering::Relaxed) + lost) >= WINDOW {
                if stuck.elapsed() > Duration::from_secs(10) {
                    // Datagrams that have not arrived until now are lost.
                    lost = number.saturating_sub(all.load(Ordering::Relaxed));
                }
                std::thread::yield_now();
            }
            let socket = &sockets[(number % SOCKETS) as usize];
            socket.send(&(number + 1).to_be_bytes())?;
            // The change takes about 20 ms: enough datagrams have to be left for the time after it.
            if number > LEAVES && number % 64 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let end = Instant::now() + Duration::from_secs(5);
        while all.load(Ordering::Relaxed) < count && Instant::now() < end {
            std::thread::yield_now();
        }
        is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            drop(thread.join());
        }
        let seen: Vec<u64> = sinks.iter().map(|sink| sink.count.load(Ordering::Relaxed)).collect();
        let last = sinks[1].last.load(Ordering::Relaxed);
        let counts = format!(
            "{family:?}: {count} sent by {SOCKETS} sockets; came to the endpoints {seen:?}; lost {}; the second \
             one left at {LEAVES}, and had its last packet with {last}; before: {before:?}",
            count.saturating_sub(seen.iter().sum())
        );
        let _ = writeln!(std::io::stdout(), "{counts}");
        ensure!(seen.iter().sum::<u64>() == count, "some are lost: {counts}");
        ensure!(seen[2] == 0, "some came to a pod of another Service: {counts}");
        ensure!((LEAVES..count - AFTER).contains(&last), "it did not leave in time: {counts}");
    }
    Ok(())
}
