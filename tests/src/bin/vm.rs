//! Boots a virtual machine for a script: `vm --program fio --module dm-delay -- 'fio --version'`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_tests::tools;
use blockd_tests::vm::{Drive, Kernel, Vm, Which};
use clap::Parser;

/// A real kernel for a script, with the daemon and whatever programs it is told to have.
#[derive(Parser, Debug)]
struct Arguments {
    /// The kernel: 6.12, 7, or all, one after the other.
    #[arg(long, value_name = "KERNEL", default_value = "6.12")]
    kernel: String,
    /// Only fetch the kernel, and say which one it is.
    #[arg(long)]
    fetch: bool,
    /// Leave the daemon out, and so don't build it.
    #[arg(long)]
    no_daemon: bool,
    /// Installed programs to have at hand.
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// Modules to load.
    #[arg(long = "module", value_name = "NAME")]
    modules: Vec<String>,
    /// Files to have: the path here, or `HERE:THERE`.
    #[arg(long = "file", value_name = "PATH[:PATH]")]
    files: Vec<String>,
    /// Raw disks, `/dev/vda` and so on.
    #[arg(long = "disk", value_name = "PATH")]
    disks: Vec<PathBuf>,
    /// Raw disks as NVMe, `/dev/nvme0n1` and so on.
    #[arg(long = "nvme", value_name = "PATH")]
    nvme: Vec<PathBuf>,
    /// Files as persistent memory, `/dev/pmem0` and so on: a multiple of 128 MiB.
    #[arg(long = "nvdimm", value_name = "PATH")]
    nvdimm: Vec<PathBuf>,
    /// Memory in MiB.
    #[arg(long, default_value_t = 1024)]
    memory: u32,
    /// Virtual processors.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Seconds until it is stopped.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Further words for qemu.
    #[arg(long = "qemu", value_name = "WORD", allow_hyphen_values = true)]
    qemu: Vec<String>,
    /// The script: lines of shell, or `@FILE`.
    #[arg(default_value = "uname -a")]
    script: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    for which in Which::chosen(&arguments.kernel)? {
        if arguments.fetch {
            println!("kernel {} is here", Kernel::get(which)?.release);
        } else {
            script(arguments, which)?;
        }
    }
    Ok(())
}

fn script(arguments: &Arguments, which: Which) -> Result<()> {
    fn words(words: &[String]) -> Vec<&str> {
        words.iter().map(String::as_str).collect()
    }
    let mut vm = Vm::new("vm")
        .kernel(which)
        .memory(arguments.memory)
        .cpus(arguments.cpus)
        .limit(Duration::from_secs(arguments.seconds))
        .modules(&words(&arguments.modules))
        .programs(&words(&arguments.programs))
        .arguments(&words(&arguments.qemu));
    if !arguments.no_daemon {
        vm = vm.program(&tools::blockd()?);
    }
    for file in &arguments.files {
        let (here, there) = file.split_once(':').unwrap_or((file, file));
        vm = vm.file(here.as_ref(), there, false);
    }
    let disks = arguments.disks.iter().cloned().map(Drive::File);
    let nvme = arguments.nvme.iter().cloned().map(Drive::Nvme);
    let nvdimm = arguments.nvdimm.iter().cloned().map(Drive::Nvdimm);
    for drive in disks.chain(nvme).chain(nvdimm) {
        vm = vm.drive(drive);
    }
    let script = match arguments.script.as_slice() {
        [one] if one.starts_with('@') => {
            std::fs::read_to_string(&one[1..]).with_context(|| format!("reading {one}"))?
        }
        lines => lines.join("\n"),
    };
    let output = vm.run(&script)?;
    print!("{}", output.text);
    eprintln!("{:.1} s", output.seconds);
    Ok(())
}
