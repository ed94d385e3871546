//! Runs many cases: those of the corpus, then random ones.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use crate::bytes::Random;
use crate::target::Target;
use crate::{case, drive};

/// How often a case that differs is run again; the difference may depend on chance.
const AGAIN: u32 = 20;
/// How often progress is printed.
const TELL: Duration = Duration::from_secs(30);

/// Settings of a campaign.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of packets in all (`BALLAST_FUZZ_CASES`).
    pub packets: u64,
    /// Seed of the random cases (`BALLAST_FUZZ_SEED`).
    pub seed: u64,
    /// Number of cases that run at the same time (`BALLAST_FUZZ_THREADS`).
    pub threads: u64,
    /// Number of differences after which the campaign ends (`BALLAST_FUZZ_DIFFERENCES`).
    pub differences: u64,
    /// Whether cases that differ, or that reach a branch of the model for the first time, are written to the corpus
    /// (`BALLAST_FUZZ_KEEP=1`).
    pub keeps: bool,
    /// Whether nothing depends on chance: a difference that does not come again is one, too.
    pub repeats: bool,
}

/// Returns a number from the environment, or `otherwise`.
fn number(name: &str, otherwise: u64) -> u64 {
    let text = env::var(name).ok();
    text.and_then(|text| text.replace('_', "").parse().ok()).unwrap_or(otherwise)
}

impl Settings {
    /// Settings for a target that needs no kernel (`BALLAST_FUZZ_HOST_CASES`). It runs with the unit tests and should take
    /// seconds.
    pub fn on_host() -> Self {
        Self {
            packets: number("BALLAST_FUZZ_HOST_CASES", 100_000),
            repeats: true,
            ..Self::from_environment()
        }
    }

    /// The same settings with XDP before tc: a fifth of the packets, as in [`Settings::early`].
    pub fn early_on_host() -> Self {
        let all = Self::on_host();
        Self { packets: all.packets / 5, ..all }
    }

    /// Settings for the programs with XDP before tc: a fifth of the packets, since XDP forwards few of them.
    pub fn early() -> Self {
        let all = Self::from_environment();
        Self { packets: all.packets / 5, ..all }
    }

    pub fn from_environment() -> Self {
        let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
        Self {
            packets: number("BALLAST_FUZZ_CASES", 1_000_000),
            seed: number("BALLAST_FUZZ_SEED", 1),
            threads: number("BALLAST_FUZZ_THREADS", cores.min(2)).max(1),
            differences: number("BALLAST_FUZZ_DIFFERENCES", 1),
            keeps: number("BALLAST_FUZZ_KEEP", 0) != 0,
            repeats: false,
        }
    }
}

/// Results of the cases.
#[derive(Default)]
struct Shown {
    /// Number of cases that reached each branch of the model.
    branches: BTreeMap<&'static str, u64>,
    differences: Vec<String>,
    /// Number of differences that did not come again.
    once: u64,
}

impl Shown {
    /// Notes a difference that did not come again.
    fn note_once(&mut self, bytes: &[u8], difference: String, settings: Settings) {
        println!(
            "replay(&{bytes:?});\n{AGAIN} more runs of this case did not show its difference: {difference}"
        );
        self.once += 1;
        if settings.repeats {
            self.differences.push(difference);
        }
    }
}

/// Runs cases on as many targets as there are threads. Returns descriptions of the cases that differ.
pub fn run<T: Target>(settings: Settings, target: impl Fn(u64) -> T + Sync) -> Vec<String> {
    let (shown, done, cases) = (Mutex::new(Shown::default()), AtomicU64::new(0), AtomicU64::new(0));
    let started = Instant::now();
    thread::scope(|scope| {
        for number in 0..settings.threads {
            let (shown, done, cases, target) = (&shown, &done, &cases, &target);
            scope.spawn(move || {
                let mut target = target(number);
                if number == 0 {
                    replay_kept(&mut target, settings, shown);
                }
                let mut random = Random::new(settings.seed.wrapping_mul(1000) + number);
                let mut last_report = Instant::now();
                while done.load(Ordering::Relaxed) < settings.packets
                    && (shown.lock().unwrap().differences.len() as u64) < settings.differences
                {
                    let bytes = case::random_bytes(&mut random);
                    let packets = one(&mut target, &bytes, settings, shown);
                    let done = done.fetch_add(packets, Ordering::Relaxed) + packets;
                    let cases = cases.fetch_add(1, Ordering::Relaxed) + 1;
                    if number == 0 && last_report.elapsed() > TELL {
                        last_report = Instant::now();
                        println!("{done} packets in {cases} cases, {:.0} s", started.elapsed().as_secs_f64());
                    }
                }
            });
        }
    });
    let shown = shown.into_inner().unwrap();
    let (done, cases) = (done.into_inner(), cases.into_inner());
    let elapsed = started.elapsed();
    let rate = u128::from(done) * 1000 / elapsed.as_millis().max(1);
    println!("{done} packets in {cases} cases, {:.1} s: {rate} packets a second", elapsed.as_secs_f64());
    if shown.once > 0 {
        println!("{} differences did not come again", shown.once);
    }
    for (branch, count) in &shown.branches {
        println!("{count:>9} {branch}");
    }
    shown.differences
}

/// Runs one case; returns how many packets it had.
fn one(target: &mut impl Target, bytes: &[u8], settings: Settings, shown: &Mutex<Shown>) -> u64 {
    let run = drive::run(target, bytes, |_, _| ());
    let differs = run.difference.is_some() && drive::differs(target, bytes, AGAIN).is_some();
    let once = run.difference.filter(|_| !differs && !run.is_slow);
    let mut new = Vec::new();
    {
        let mut shown = shown.lock().unwrap();
        for branch in &run.reached {
            let count = shown.branches.entry(branch).or_default();
            if *count == 0 {
                new.push(*branch);
            }
            *count += 1;
        }
        if let Some(difference) = once {
            shown.note_once(bytes, difference, settings);
        }
    }
    if differs {
        let small = drive::shrink(target, bytes);
        let text = drive::describe(target, &small);
        println!("{text}");
        let mut shown = shown.lock().unwrap();
        if settings.keeps {
            keep(&format!("difference {} {}", settings.seed, shown.differences.len()), &small);
        }
        shown.differences.push(text);
    } else if settings.keeps {
        for branch in new {
            let small = drive::minimize(bytes, |smaller| {
                // A run may take another branch by chance; one of three runs is enough.
                (0..3).any(|_| drive::run(target, smaller, |_, _| ()).reached.contains(branch))
            });
            keep(branch, &small);
        }
    }
    run.packets
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus")
}

fn keep(name: &str, bytes: &[u8]) {
    let name: String = name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
    fs::write(corpus().join(name), bytes).unwrap();
}

/// Returns the cases of the corpus by name.
pub fn kept() -> BTreeMap<String, Vec<u8>> {
    let Ok(entries) = fs::read_dir(corpus()) else { return BTreeMap::new() };
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(Result::unwrap).map(read).collect()
}

fn replay_kept(target: &mut impl Target, settings: Settings, shown: &Mutex<Shown>) {
    for (name, bytes) in kept() {
        let run = drive::run(target, &bytes, |_, _| ());
        let mut shown = shown.lock().unwrap();
        for branch in run.reached {
            *shown.branches.entry(branch).or_default() += 1;
        }
        if run.difference.is_some() && drive::differs(target, &bytes, AGAIN).is_some() {
            let text = format!("corpus/{name}:\n{}", drive::describe(target, &bytes));
            println!("{text}");
            shown.differences.push(text);
        } else if let Some(difference) = run.difference.filter(|_| !run.is_slow) {
            shown.note_once(&bytes, difference, settings);
        }
    }
}
