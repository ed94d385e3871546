//! Fuzzing: sends random packets through random Services and compares the results of the programs with those of a slow
//! model.
//!
//! A case is a string of bytes (`case.rs`). `corpus/` holds a case for each branch of the model; these run first, then
//! random ones: `cargo xtask test fuzz --cases 100000000` runs more of them. A case that differs is minimized and printed with a
//! line that runs it again: as a test in `replays.rs`, or at once as `BALLAST_FUZZ_REPLAY='replay(...)'`.
//!
//! ```text
//! bytes -> case, world, forge -> drive -> target: kernel   (tables, raw)
//!                                     \-> model             (parse, new_flow, established, tunnel, control, ...)
//! ```
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "a test that runs for minutes tells how far it is")]

mod bytes;
mod campaign;
mod case;
mod drive;
mod forge;
mod host;
mod inverse;
mod kernel;
mod model;
mod raw;
mod replays;
mod report;
mod scenario;
mod tables;
mod target;
mod tunnel;

use proxy_testbed::isolate::isolate;
use std::env;
use std::path::PathBuf;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

use campaign::Settings;
use host::Host;
use kernel::Kernel;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let wanted = arguments.include_ignored || arguments.ignored;
    let bpffs = if wanted && !arguments.list { isolate() } else { PathBuf::new() };
    let [again, early] = [bpffs.clone(), bpffs.clone()];
    let trials = vec![
        Trial::test("a translation there and back changes nothing", inverse::there_and_back),
        Trial::test("the stages on the host are as the model", move || {
            judge(&campaign::run(Settings::on_host(), |_| Host::new()))
        }),
        Trial::test("the stages on the host are as the model, with XDP before tc", move || {
            let differences = campaign::run(Settings::early_on_host(), |_| Host::early());
            if host::taken_early() == 0 {
                return Err("XDP has left all packets to tc".into());
            }
            judge(&differences)
        }),
        Trial::test("what differed once is as the model, on the host", || replays::run(&mut Host::new())),
        Trial::test("what differed once is as the model", move || replays::run(&mut Kernel::new(&again, 99)))
            .with_ignored_flag(true),
        Trial::test("the programs are as the model", move || {
            if let Ok(text) = env::var("BALLAST_FUZZ_REPLAY") {
                println!("{}", drive::describe(&mut Kernel::new(&bpffs, 0), &replays::bytes_of(&text)));
                return Ok(());
            }
            judge(&campaign::run(Settings::from_environment(), |number| Kernel::new(&bpffs, number)))
        })
        .with_ignored_flag(true),
        Trial::test("the programs are as the model, with XDP before tc", move || {
            if let Ok(text) = env::var("BALLAST_FUZZ_REPLAY") {
                println!("{}", drive::describe(&mut Kernel::early(&early, 200), &replays::bytes_of(&text)));
                return Ok(());
            }
            let differences = campaign::run(Settings::early(), |number| Kernel::early(&early, 200 + number));
            println!("{} packets taken by XDP", kernel::early::taken());
            if kernel::early::taken() == 0 {
                return Err("XDP has left all packets to tc".into());
            }
            judge(&differences)
        })
        .with_ignored_flag(true),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn judge(differences: &[String]) -> Result<(), Failed> {
    if differences.is_empty() { Ok(()) } else { Err(format!("{} cases differ", differences.len()).into()) }
}
