//! Two CPUs that process packets of a new flow at the same time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use aya::{TestRun as _, TestRunOptions};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Scenario;
use proxy_testbed::Family;
use proxy_testbed::harness::{Harness, Hook, Service, context_of};
use proxy_testbed::packet::{Packet, UDP};

const ROUNDS: u32 = 2000;
const CPUS: u32 = 2;

pub const SCENARIOS: [Scenario; 2] = [
    Scenario { name: "two CPUs begin the same flow at once", flows: 65_536, test: one_flow },
    Scenario {
        name: "two CPUs begin flows that their backend could not tell apart",
        flows: 8192,
        test: alike,
    },
];

/// Returns the CPUs on which this thread may run.
pub fn allowed() -> Vec<usize> {
    let allowed = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect()
}

/// Keeps this thread on a CPU.
pub fn stay_on(cpu: usize) {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    sched_setaffinity(None, &cpus).unwrap();
}

/// In each round, runs one packet on each CPU at the same moment; returns the resulting packets of each CPU.
fn together(harness: &Harness, packets: impl Fn(u32, u32) -> Vec<u8> + Sync) -> Vec<Vec<Vec<u8>>> {
    let turn = AtomicU32::new(0);
    let program = harness.program(Hook::Ingress.program());
    let context = context_of(Hook::Ingress, 0);
    let cpus = allowed();
    let run = |cpu: u32| {
        stay_on(cpus[cpu as usize % cpus.len()]);
        let mut out = [0; 256];
        (0..ROUNDS)
            .map(|round| {
                let packet = packets(round, cpu);
                turn.fetch_add(1, Ordering::SeqCst);
                while turn.load(Ordering::SeqCst) < (round + 1) * CPUS {
                    std::hint::spin_loop();
                }
                let options = TestRunOptions {
                    data_in: Some(&packet),
                    data_out: Some(&mut out),
                    ctx_in: Some(&context),
                    ..TestRunOptions::default()
                };
                let result = program.test_run(options).unwrap();
                out[..result.data_size_out as usize].to_vec()
            })
            .collect()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..CPUS)
            .map(|cpu| {
                let run = &run;
                scope.spawn(move || run(cpu))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Both packets must go to the same backend, and one flow must be left.
fn one_flow(family: Family, harness: &mut Harness) {
    let frontend = family.frontend(1, 53);
    let pods: Vec<_> = (1..=8).map(|pod| family.pod(pod, 53)).collect();
    harness.serve(&[Service::new(7, UDP, frontend, &pods)]);
    let seen =
        together(harness, |round, _| Packet::udp(family.client(1, 1024 + round as u16), frontend).bytes());
    let split = seen[0].iter().zip(&seen[1]).filter(|(one, other)| one != other).count();
    assert_eq!(split, 0, "flows went to two backends");
    assert_eq!(
        (harness.flows(family).len(), harness.key_count(family)),
        (ROUNDS as usize, 2 * ROUNDS as usize)
    );
    assert_eq!(harness.reasons(), []);
}

/// Two frontends, one client port, one backend: one of the two flows gets another source port.
fn alike(family: Family, harness: &mut Harness) {
    let (frontends, pod) = ([family.frontend(1, 53), family.frontend(2, 53)], family.pod(1, 53));
    harness.serve(&[Service::new(7, UDP, frontends[0], &[pod]), Service::new(8, UDP, frontends[1], &[pod])]);
    let seen = together(harness, |round, cpu| {
        Packet::udp(family.client(1, 1024 + round as u16), frontends[cpu as usize]).bytes()
    });
    let same = seen[0].iter().zip(&seen[1]).filter(|(one, other)| one == other).count();
    assert_eq!(same, 0, "their backend could not tell them apart");
    let keys = 4 * ROUNDS as usize;
    assert_eq!((harness.flows(family).len(), harness.key_count(family)), (keys / 2, keys));
    assert_eq!(harness.reasons(), []);
}
