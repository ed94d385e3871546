//! Maglev tables: time and memory of many, imbalance of the shares, and how many flows move when an endpoint is removed.

use std::net::Ipv4Addr;
use std::time::Instant;

use proxy_common::maglev::backend;
use proxy_core::plan::BackendAddress;
use proxy_core::plan::maglev::{Member, entries, packed};

use proxy_testbed::report::{Row, median};

const TABLES: u32 = 50_000;
const ENDPOINTS: u32 = 5;
/// How often all [`TABLES`] are made.
const ROUNDS: usize = 3;
/// Numbers of endpoints for which imbalance and moves are measured.
const SIZES: [u32; 6] = [2, 5, 10, 20, 100, 250];
/// Numbers of endpoints that are one above what a size of tables allows.
const OUTGROWN: [u32; 3] = [7, 26, 103];
const SETS: u32 = 20;
const FLOWS: u32 = 20_000;

/// Returns the endpoints of a Service; each `set` has others.
fn members(set: u32, count: u32) -> Vec<Member> {
    let member = |number| {
        let address = Ipv4Addr::from_bits(0x0a00_0000 + set * 512 + number).into();
        Member { at: BackendAddress { address, port: 8080 }, weight: 1, id: number + 1 }
    };
    (0..count).map(member).collect()
}

/// Returns by how many percent of the mean the largest share exceeds the mean.
fn imbalance(members: &[Member]) -> f64 {
    let entries = entries(members);
    let mut shares = vec![0_u32; members.len()];
    for member in &entries {
        shares[usize::from(*member)] += 1;
    }
    let mean = entries.len() as f64 / members.len() as f64;
    let most = shares.iter().copied().max().unwrap_or_default();
    100.0 * (f64::from(most) / mean - 1.0)
}

/// Removes the first endpoint; returns the percentage of the other endpoints' flows that move to another endpoint.
fn moved(members: &[Member]) -> f64 {
    let (before, after) = (packed(members), packed(&members[1..]));
    let to = |table: &[u64], hash| backend(0, hash, |at| table.get(at as usize).copied());
    let hashes = (0..FLOWS).map(|n| n.wrapping_mul(0x9e37_79b1));
    let stay: Vec<_> =
        hashes.map(|hash| (hash, to(&before, hash))).filter(|(_, id)| *id != members[0].id).collect();
    let lost = stay.iter().filter(|(hash, id)| to(&after, *hash) != *id).count();
    100.0 * lost as f64 / stay.len() as f64
}

/// Returns sets of `count` endpoints.
fn sets(count: u32) -> Vec<Vec<Member>> {
    (0..SETS).map(|set| members(set, count)).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Measures all figures of this file.
pub fn measure() -> Vec<Row> {
    let group = "Maglev tables";
    let mut bytes = 0;
    let times = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        let words: usize = (0..TABLES).map(|set| packed(&members(set, ENDPOINTS)).len()).sum();
        bytes = words * size_of::<u64>();
        start.elapsed().as_secs_f64()
    });
    let many = format!("{TABLES} tables of {ENDPOINTS} endpoints");
    let time = median(times.collect());
    let mut rows = vec![
        Row::new(group, format!("{many}, made"), time, "s", Some(1.0)),
        Row::new(group, format!("{many}, in the map"), bytes as f64 / 1e6, "MB", Some(60.0)),
    ];
    for size in SIZES {
        let sets = sets(size);
        let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let above: Vec<_> = sets.iter().map(|set| imbalance(set)).collect();
        let moves: Vec<_> = sets.iter().map(|set| moved(set)).collect();
        let what = |what: &str| format!("{size} endpoints: {what}");
        rows.extend([
            Row::new(group, what("imbalance, most of 20 sets"), most(&above), "%", Some(1.0)),
            Row::new(group, what("flows that move without need, mean"), mean(&moves), "%", Some(2.0)),
            Row::new(group, what("the same, most of 20 sets"), most(&moves), "%", None),
        ]);
    }
    for size in OUTGROWN {
        let fewer = size - 1;
        let what =
            format!("{size} endpoints, {fewer} have a smaller table: flows that move without need, mean");
        let moves: Vec<_> = sets(size).iter().map(|set| moved(set)).collect();
        rows.push(Row::new(group, what, mean(&moves), "%", None));
    }
    rows
}
