//! Ballast's task runner: what `cargo xtask` can do, one module per command.
//!
//! It depends on none of the other crates but `proxy-common`, which needs nothing but the compiler: it must build
//! before they do. Its tests also use `proxy-user`.

pub mod apiserver;
pub mod apt;
pub mod bench;
pub mod build;
pub mod cargotools;
pub mod chart;
pub mod cluster;
pub mod coverage;
pub mod cross;
pub mod demo;
pub mod deny;
pub mod docs;
pub mod e2e;
pub mod exec;
pub mod explained;
pub mod fuzz;
pub mod go;
pub mod gotools;
pub mod host;
pub mod image;
pub mod kernel;
pub mod linker;
pub mod lint;
pub mod log;
pub mod mutants;
pub mod object;
pub mod package;
pub mod previous;
pub mod release;
pub mod reproducible;
pub mod scale;
pub mod setup;
pub mod signal;
pub mod test;
pub mod toolchain;
pub mod workspace;
