//! Compiles the description of the interface, options such as `csi_secret` among it, for reading
//! messages by it.
#![forbid(unsafe_code)]

use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let mut compiler = protox::Compiler::new(["../proto"])?;
    let files = compiler.include_imports(true).open_file("csi.proto")?;
    let out = std::env::var("OUT_DIR")?;
    std::fs::write(Path::new(&out).join("csi.bin"), files.encode_file_descriptor_set())?;
    println!("cargo::rerun-if-changed=../proto");
    Ok(())
}
