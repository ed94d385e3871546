//! Runs cases one after the other, and minimizes those that differ.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::bytes::Bytes;
use crate::case::{self, STEP_BYTES, Sent, Step};
use crate::model::{Met, Model};
use crate::report;
use crate::scenario::{SERVICE_BYTES, Scenario, WORLD_BYTES};
use crate::target::{Counters, Target};

/// How often a case that differs is run again, to see whether it differs again: endpoints and ports are selected at random.
const TRIES: u32 = 12;
/// A case that takes longer says nothing about timeouts: the machine was busy.
const SLOW: Duration = Duration::from_millis(80);

/// The result of a case.
#[derive(Default)]
pub struct Run {
    pub packets: u64,
    pub reached: BTreeSet<&'static str>,
    /// The first difference between target and model.
    pub difference: Option<String>,
    pub is_slow: bool,
}

/// Runs a case on a target and on the model. Calls `report` after each step.
pub fn run(target: &mut dyn Target, bytes: &[u8], mut report: impl FnMut(&Step, Option<&Sent>)) -> Run {
    let started = Instant::now();
    let mut rest = Bytes::new(bytes);
    let scenario = Scenario::decode(&mut rest);
    let mut model = Model::new(&scenario);
    target.begin(&model.scenario);
    let (mut before, mut run) = (Vec::<Sent>::new(), Run::default());
    while let Some(step) = case::next(&mut rest, &model.scenario, &before) {
        let result = one(target, &mut model, &step, &mut before);
        run.packets += u64::from(matches!(step, Step::Packet(..)));
        let is_packet = matches!(step, Step::Packet(..)) && result != Err(String::new());
        report(&step, before.last().filter(|_| is_packet));
        if let Err(difference) = result {
            run.difference = Some(difference);
            break;
        }
    }
    run.reached = model.reached;
    run.is_slow = started.elapsed() > SLOW;
    run
}

/// Runs one step.
fn one(
    target: &mut dyn Target,
    model: &mut Model,
    step: &Step,
    before: &mut Vec<Sent>,
) -> Result<(), String> {
    match step {
        Step::Pause(milliseconds) => {
            target.pause(*milliseconds);
            model.pause(*milliseconds);
        }
        Step::Endpoint(service, endpoint) => {
            model.turn(*service, *endpoint);
            target.update(&model.scenario);
        }
        Step::Service(service) => {
            model.replace(*service);
            target.update(&model.scenario);
        }
        Step::Swap(service) => {
            model.swap(*service);
            target.update(&model.scenario);
        }
        Step::Nothing => {}
        Step::Packet(hook, context, packet) => {
            let seen = target.run(*hook, packet, *context)?;
            let sent = Sent { hook: *hook, context: *context, packet: packet.clone(), seen };
            let met = Met { hook: *hook, context: *context, input: packet, seen: &sent.seen, target };
            let result = model.check(met);
            before.push(sent);
            result?;
            same(&model.counters, &target.counters())?;
        }
    }
    Ok(())
}

fn same(model: &Counters, target: &Counters) -> Result<(), String> {
    if model == target {
        return Ok(());
    }
    Err(format!("other counters:\n  should be {model:?}\n  are       {target:?}"))
}

/// Runs a case until it differs, at most `tries` times: random selections may decide whether it differs.
pub fn differs(target: &mut dyn Target, bytes: &[u8], tries: u32) -> Option<String> {
    (0..tries).find_map(|_| {
        let run = run(target, bytes, |_, _| ());
        run.difference.filter(|_| !run.is_slow)
    })
}

/// Returns the smallest case that still differs, without the steps, Services and bytes that are not needed for that.
pub fn shrink(target: &mut dyn Target, bytes: &[u8]) -> Vec<u8> {
    minimize(bytes, |smaller| differs(target, smaller, TRIES).is_some())
}

/// Removes everything from a case that is not needed for `wanted` to stay true.
pub fn minimize(bytes: &[u8], mut wanted: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut best = without_records(bytes.to_vec(), &mut wanted);
    simpler_bytes(&mut best, &mut wanted);
    best = without_records(best, &mut wanted);
    while best.last() == Some(&0) && !best.len().is_multiple_of(STEP_BYTES) {
        let smaller = &best[..best.len() - 1];
        if !wanted(smaller) {
            break;
        }
        best.pop();
    }
    best
}

fn without_records(mut best: Vec<u8>, wanted: &mut impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    let mut is_smaller = true;
    while is_smaller {
        is_smaller = false;
        for range in case::records(&best).into_iter().rev() {
            let mut smaller = best.clone();
            if range.end > smaller.len() {
                continue;
            }
            smaller.drain(range.clone());
            if range.len() == SERVICE_BYTES
                && range.start < WORLD_BYTES + Scenario::count(&best) * SERVICE_BYTES
            {
                smaller[1] = Scenario::count(&best) as u8 - 1;
            }
            if wanted(&smaller) {
                best = smaller;
                is_smaller = true;
                break;
            }
        }
    }
    best
}

fn simpler_bytes(best: &mut Vec<u8>, wanted: &mut impl FnMut(&[u8]) -> bool) {
    for at in 0..best.len() {
        let byte = best[at];
        // Most bytes are used modulo a small number.
        for value in [0, byte % 4, byte % 8, byte % 16, byte % 32, byte & 0xf0, byte / 2] {
            if value < best[at] && at != 1 {
                let mut smaller = best.clone();
                smaller[at] = value;
                if wanted(&smaller) {
                    *best = smaller;
                }
            }
        }
    }
}

/// Describes a case in words, with its present results.
pub fn describe(target: &mut dyn Target, bytes: &[u8]) -> String {
    let mut text = String::new();
    for _ in 0..TRIES {
        text = report::scenario(&Scenario::decode(&mut Bytes::new(bytes)));
        let run = run(target, bytes, |step, sent| {
            text.push_str(&report::step(step, sent));
            text.push('\n');
        });
        if let Some(difference) = run.difference {
            text.push_str("DIFFERENCE: ");
            text.push_str(&difference);
            text.push('\n');
            break;
        }
    }
    text.push_str(&report::replay(bytes));
    text.push('\n');
    text
}
