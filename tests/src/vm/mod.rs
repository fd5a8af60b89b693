//! Real kernels for tests: qemu boots Debian's cloud kernel into a root in memory that holds the
//! named programs, and runs a script there. Nothing is installed and no root is needed. Without
//! hardware help a boot takes some three seconds. A complaint of the kernel fails the run.
//!
//! ```no_run
//! use blockd_tests::vm::{Drive, Vm};
//! let vm = Vm::new("example").modules(&["dm-delay"]).programs(&["dmsetup"]);
//! let output = vm.run("dmsetup targets").unwrap();
//! assert!(output.text.contains("delay"));
//! ```

mod console;
#[expect(unsafe_code, reason = "an instruction that reads the processor's counter")]
mod counter;
mod drive;
mod fetch;
pub mod forgetful;
mod initramfs;
mod kernel;
mod network;
mod packages;
mod qmp;
mod running;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use blockd_testkit::tools;

use drive::Frame;
pub use drive::{Drive, Persistence};
use initramfs::Initramfs;
pub use kernel::{Kernel, Which};
pub use network::Network;
pub use qmp::Monitor;
pub use running::{Output, Running};

/// A program beyond this size is stripped before it goes into the guest, which has to unpack it.
const STRIPPED_BEYOND: u64 = 4 << 20;

/// For every guest: warnings go to the console, where they are looked for, and a kernel that is
/// broken stops, which ends the run.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 oops=panic quiet loglevel=5";

/// Without the fast string instructions, the kernel copies eight bytes at a time. With them the
/// emulator would count an instruction for each byte, and copies would hide all other work.
const COUNTED_CPU: &str = "max,erms=off,fsrm=off";

/// For a machine that counts instructions: addresses are the same in each boot, and the processor's
/// counter is the clock from the start.
const COUNTED_WORDS: &str = " nokaslr norandmaps tsc=reliable clocksource=tsc mitigations=off";

/// Boots to try where the emulator breaks the kernel, which it does in some of a hundred.
const BOOTS: u32 = 4;

/// Loaded in every guest: its disks.
const ALWAYS: [&str; 2] = ["virtio_pci", "virtio_blk"];

/// A machine to boot.
#[derive(Clone, Debug)]
pub struct Vm {
    name: String,
    kernel: Which,
    expected: Vec<String>,
    memory_mib: u32,
    cpus: u32,
    limit: Duration,
    modules: Vec<String>,
    programs: Vec<PathBuf>,
    missing: Vec<String>,
    packages: Vec<String>,
    port: Option<network::Port>,
    files: Vec<(PathBuf, String, bool)>,
    drives: Vec<Drive>,
    arguments: Vec<String>,
    /// Further words for the kernel.
    words: String,
    nodes: u32,
    persistence: Persistence,
    /// The script takes the place of the first process.
    script_is_first: bool,
    /// Where random numbers begin in a machine whose clock counts instructions.
    counts_instructions: Option<u32>,
}

impl Vm {
    /// Two processors, 1 GiB, two minutes, nothing but a shell. The name is for the artefacts.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kernel: Which::default(),
            expected: Vec::new(),
            memory_mib: 1024,
            cpus: 2,
            limit: Duration::from_secs(120),
            modules: Vec::new(),
            programs: Vec::new(),
            missing: Vec::new(),
            packages: Vec::new(),
            port: None,
            files: Vec::new(),
            drives: Vec::new(),
            arguments: Vec::new(),
            words: String::new(),
            nodes: 1,
            persistence: Persistence::default(),
            script_is_first: false,
            counts_instructions: None,
        }
    }

    /// The kernel to boot; the older one without a word.
    #[must_use]
    pub fn kernel(mut self, which: Which) -> Self {
        self.kernel = which;
        self
    }

    /// A complaint of the kernel that has this in its line is no failure. Any other is: a bug, a
    /// warning, a task that is stuck.
    #[must_use]
    pub fn expects(mut self, part: &str) -> Self {
        self.expected.push(part.to_owned());
        self
    }

    /// Memory in MiB. The root takes as much as its files are large.
    #[must_use]
    pub fn memory(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Virtual processors.
    #[must_use]
    pub fn cpus(mut self, count: u32) -> Self {
        self.cpus = count;
        self
    }

    /// After this time the machine is stopped, and that is an error.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Modules loaded before the script starts, with what they need. Parameters follow the name, as
    /// in `"scsi_debug dev_size_mb=64"`.
    #[must_use]
    pub fn modules(mut self, names: &[&str]) -> Self {
        self.modules.extend(names.iter().map(|&name| name.to_owned()));
        self
    }

    /// Installed programs, put at the same path with the libraries they name.
    #[must_use]
    pub fn programs(mut self, names: &[&str]) -> Self {
        for name in names {
            match tools::find(name) {
                Ok(path) => self.programs.push(path),
                // Reported when the machine is started, which can fail anyway.
                Err(_) => self.missing.push((*name).to_owned()),
            }
        }
        self
    }

    /// Programs of Debian packages, which need not be installed here, with their libraries: for the
    /// newer kernel those of the suite that it comes from.
    #[must_use]
    pub fn packages(mut self, names: &[&str]) -> Self {
        self.packages.extend(names.iter().map(|&name| name.to_owned()));
        self
    }

    /// A card on a port of a network, `eth0`, without an address.
    #[must_use]
    pub fn network(mut self, network: &Network, port: usize) -> Self {
        self.port = Some(network.port(port));
        self.modules(&["virtio_net"])
    }

    /// A program from anywhere, put at `/usr/bin/NAME` with its libraries.
    #[must_use]
    pub fn program(self, host: &Path) -> Self {
        let name = host.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.file(host, &format!("/usr/bin/{name}"), true)
    }

    /// A file of the host at a path of the guest.
    #[must_use]
    pub fn file(mut self, host: &Path, guest: &str, executable: bool) -> Self {
        self.files.push((host.to_path_buf(), guest.to_owned(), executable));
        self
    }

    /// The next disk.
    #[must_use]
    pub fn drive(mut self, drive: Drive) -> Self {
        self.drives.push(drive);
        self
    }

    /// Further arguments of qemu, for devices that nothing else here speaks of.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&word| word.to_owned()));
        self
    }

    /// Further words for the kernel, as `memmap=512M!1G`.
    #[must_use]
    pub fn words(mut self, words: &str) -> Self {
        self.words = format!(" {words}");
        self
    }

    /// Memory and processors in `count` nodes, the same amount in each.
    #[must_use]
    pub fn nodes(mut self, count: u32) -> Self {
        self.nodes = count;
        self
    }

    /// The persistence domain that the platform states for its persistent memory.
    #[must_use]
    pub fn persistence(mut self, persistence: Persistence) -> Self {
        self.persistence = persistence;
        self
    }

    /// The script becomes the guest's first process, so that it may hand over to a system on a disk
    /// (`switch_root`). That system prints `@@ended 0` to the second serial line, and switches off.
    #[must_use]
    pub fn script_as_first_process(mut self) -> Self {
        self.script_is_first = true;
        self
    }

    /// One processor, emulated, whose clock advances by one nanosecond with each instruction and
    /// jumps to the next timer when it is idle. Two boots of the same files with the same seed do
    /// the same: random numbers and the date begin alike, and nothing depends on how fast the host
    /// is.
    #[must_use]
    pub fn counting_instructions(mut self, seed: u32) -> Self {
        self.counts_instructions = Some(seed);
        self.cpus(1)
    }

    /// Boots, runs the script to its end and stops. Everything that the script prints is the
    /// output, errors included.
    ///
    /// # Errors
    /// When the machine can't be started, the script does not end with 0, or the time is over. The
    /// message has the end of the output and names the folder that keeps everything.
    pub fn run(&self, script: &str) -> Result<Output> {
        self.start(script)?.finish()
    }

    /// As [`Self::run`], and comes back while the script runs, to speak with it.
    ///
    /// # Errors
    /// When the machine can't be started, or does not come as far as the script.
    pub fn start(&self, script: &str) -> Result<Running> {
        let qemu = tools::find("qemu-system-x86_64")?;
        for program in &self.missing {
            tools::find(program)?;
        }
        let kernel = Kernel::get(self.kernel)?;
        let folder = self.folder()?;
        let root = self.root(&kernel, &folder, script)?;
        fs::write(folder.join("script"), script)?;
        fs::write(folder.join("root"), root)?;
        let mut attempt = 1;
        loop {
            let mut running = self.spawn(&qemu, &kernel, folder.clone())?;
            match running.booted() {
                Ok(()) => return Ok(running),
                Err(_) if attempt < BOOTS && running.emulator_failed() => {
                    eprintln!("{}: boot {attempt} died of the emulator's fault; again", self.name);
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a qemu that waits for the guest of another one, as the argument `-incoming` says.
    /// Only further arguments may differ between the two.
    ///
    /// # Errors
    /// When the machine can't be started.
    pub fn start_incoming(&self, source: &Running) -> Result<Running> {
        let qemu = tools::find("qemu-system-x86_64")?;
        let folder = self.folder()?;
        fs::hard_link(source.root(), folder.join("root")).context("linking the guest's root")?;
        self.spawn(&qemu, &Kernel::get(self.kernel)?, folder)
    }

    fn spawn(&self, qemu: &Path, kernel: &Kernel, folder: PathBuf) -> Result<Running> {
        let mut command = Command::new(qemu);
        self.machine(&mut command, kernel, &folder)?;
        fs::write(folder.join("command"), tools::describe(&command))?;
        Running::start(command, folder, self.limit, self.expected.clone())
    }

    /// A folder of this run alone.
    fn folder(&self) -> Result<PathBuf> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{}-{number}", self.name, std::process::id());
        let folder = tools::build_folder()?.join("vm/run").join(name);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(folder)
    }

    fn root(&self, kernel: &Kernel, folder: &Path, script: &str) -> Result<Vec<u8>> {
        let mut unpacked = Vec::new();
        if !self.packages.is_empty() {
            let names: Vec<&str> = self.packages.iter().map(String::as_str).collect();
            unpacked.push(packages::get(self.kernel, &names)?);
        }
        let mut root = Initramfs::new(&unpacked)?;
        root.text("/init", include_str!("init.sh"), true);
        root.text("/script", script, true);
        if self.script_is_first {
            root.text("/script-is-first", "", false);
        }
        let mut asked: Vec<&str> = ALWAYS.into();
        asked.extend(self.drives.iter().flat_map(|drive| drive.modules()));
        asked.extend(self.modules.iter().map(String::as_str));
        let asked: Vec<(&str, &str)> =
            asked.iter().map(|module| module.split_once(' ').unwrap_or((module, ""))).collect();
        let names: Vec<&str> = asked.iter().map(|(name, _)| *name).collect();
        let mut order = String::new();
        for (number, module) in kernel.modules(&names)?.iter().enumerate() {
            let file = module.file_name().unwrap_or_default().to_string_lossy();
            let guest = format!("/modules/{number:02}-{file}");
            root.file(module, &guest, false)?;
            let is_it = |name: &str| kernel::module_name(name) == kernel::module_name(&file);
            let parameters = asked.iter().find(|(name, _)| is_it(name)).map_or("", |(_, all)| all);
            order.push_str(&format!("{guest} {parameters}\n"));
        }
        root.text("/modules/order", &order, false);
        for program in &self.programs {
            root.program(program)?;
        }
        for (host, guest, executable) in &self.files {
            let large = fs::metadata(host).is_ok_and(|data| data.len() > STRIPPED_BEYOND);
            if *executable && large {
                let small = stripped(host, folder)?;
                root.program_at(&small, guest)?;
                fs::remove_file(small)?;
            } else if *executable {
                root.program_at(host, guest)?;
            } else {
                root.file(host, guest, false)?;
            }
        }
        Ok(root.finish())
    }

    fn machine(&self, qemu: &mut Command, kernel: &Kernel, folder: &Path) -> Result<()> {
        // Hardware help is asked for by name only: where the machine is itself a guest, the device
        // may be there and fail after the start.
        let help = std::env::var("BLOCKD_VM_ACCEL").unwrap_or_else(|_| "tcg,thread=multi".into());
        if let Some(seed) = self.counts_instructions {
            qemu.args(["-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"]);
            qemu.args(["-cpu", COUNTED_CPU, "-rtc", "base=2026-01-01,clock=vm"]);
            qemu.arg("-seed").arg(seed.to_string());
        } else {
            qemu.args(["-accel", &help, "-cpu", "max"]);
        }
        qemu.arg("-nodefaults");
        qemu.args(["-no-user-config", "-no-reboot", "-display", "none"]);
        // Processors of one socket are never near different nodes.
        qemu.arg("-smp").arg(format!("{},sockets={}", self.cpus, self.nodes));
        let (memory_mib, nodes, cpus) = (self.memory_mib, self.nodes, self.cpus);
        let frame = Frame { memory_mib, nodes, cpus, persistence: self.persistence };
        qemu.args(drive::machine(&frame, &self.drives)?);
        qemu.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(folder.join("root"));
        let more = match self.counts_instructions {
            Some(_) => COUNTED_WORDS.to_owned(),
            None if help.starts_with("tcg") => {
                format!(" LIMIT={}{}", self.limit.as_secs(), counter::word())
            }
            None => format!(" LIMIT={}", self.limit.as_secs()),
        };
        qemu.args(["-append", &format!("{COMMAND_LINE}{more}{}", self.words)]);
        // The kernel's messages go to a file, those of the script to us.
        qemu.arg("-chardev")
            .arg(format!("file,id=kernel,path={}", drive::option(&folder.join("console"))));
        qemu.args(["-chardev", "stdio,id=script,signal=off"]);
        qemu.args(["-serial", "chardev:kernel", "-serial", "chardev:script"]);
        qemu.args(self.port.iter().flat_map(network::Port::words));
        qemu.args(&self.arguments);
        Ok(())
    }
}

/// A copy without symbols for debuggers, which are most of a build of ours.
fn stripped(program: &Path, folder: &Path) -> Result<PathBuf> {
    let copy = folder.join(program.file_name().unwrap_or_default());
    let mut strip = Command::new(tools::find("strip")?);
    tools::output(strip.arg("--strip-debug").arg("-o").arg(&copy).arg(program))?;
    Ok(copy)
}
