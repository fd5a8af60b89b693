//! Generates the Rust code of the interface, and names the commit in `--version`. Needs no protoc:
//! protox compiles the description.
#![forbid(unsafe_code)]

#[path = "../blockd/build.rs"]
mod version;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = protox::compile(["proto/csi.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    println!("cargo::rerun-if-changed=proto");
    version::main();
    Ok(())
}
