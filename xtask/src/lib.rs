//! Ballast's task runner, `cargo xtask`: one module per command.
//!
//! Of the other crates, the task runner depends only on `proxy-common`, which needs only the compiler: cargo must be able to
//! build it before the others. The tests of the task runner also use `proxy-user`.

pub mod apiserver;
pub mod apt;
pub mod bench;
pub mod build;
pub mod cargotools;
pub mod chart;
pub mod cluster;
pub mod cross;
pub mod demo;
pub mod deny;
pub mod docs;
pub mod e2e;
pub mod exec;
pub mod fuzz;
pub mod go;
pub mod gotools;
pub mod host;
pub mod image;
pub mod kernel;
pub mod linker;
pub mod lint;
pub mod log;
pub mod object;
pub mod package;
pub mod release;
pub mod scale;
pub mod setup;
pub mod signal;
pub mod test;
pub mod toolchain;
pub mod workspace;
