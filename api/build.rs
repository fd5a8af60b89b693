//! Generates the Rust code of the control API. Needs no protoc: protox compiles the description.
#![forbid(unsafe_code)]

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = protox::compile(
        ["proto/blockd/v1/control.proto", "proto/blockd/v1/peers.proto"],
        ["proto"],
    )?;
    // Maps in order, so that equal messages are equal bytes and equal text.
    tonic_prost_build::configure().btree_map(".").compile_fds(files)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
