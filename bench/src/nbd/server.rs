//! The servers that are compared, and how each is started.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use blockd_testkit::clock::Clock;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::claims::Medium;
use super::ours;
use super::process::Tree;

/// A server with its mode of access to its backing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// blockd.
    Blockd,
    /// qemu-nbd on a raw image through the page cache.
    QemuRaw,
    /// qemu-nbd on a raw image with O_DIRECT and io_uring.
    QemuDirect,
    /// qemu-nbd on a raw image with O_DIRECT and Linux's older asynchronous IO.
    QemuNative,
    /// qemu-nbd on a qcow2 image with O_DIRECT.
    Qcow2,
    /// The same, on an image with sub-clusters.
    Qcow2Extended,
    /// qemu-storage-daemon on a raw image through the page cache.
    StorageDaemon,
    /// The same with O_DIRECT.
    StorageDaemonDirect,
    /// nbdkit with its file plugin.
    NbdkitFile,
    /// nbdkit with its memory plugin.
    NbdkitMemory,
    /// nbdkit with its memory plugin and memory allocated at once.
    NbdkitMalloc,
    /// nbd-server.
    NbdServer,
}

impl Kind {
    /// Its name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Blockd => "blockd",
            Self::QemuRaw => "qemu-nbd raw, writeback",
            Self::QemuDirect => "qemu-nbd raw, O_DIRECT, io_uring",
            Self::QemuNative => "qemu-nbd raw, O_DIRECT, native",
            Self::Qcow2 => "qemu-nbd qcow2, O_DIRECT",
            Self::Qcow2Extended => "qemu-nbd qcow2 extended L2, O_DIRECT",
            Self::StorageDaemon => "qemu-storage-daemon, writeback",
            Self::StorageDaemonDirect => "qemu-storage-daemon, O_DIRECT",
            Self::NbdkitFile => "nbdkit file",
            Self::NbdkitMemory => "nbdkit memory",
            Self::NbdkitMalloc => "nbdkit memory, malloc",
            Self::NbdServer => "nbd-server",
        }
    }

    /// Whether it is one of qcow2.
    #[must_use]
    pub fn is_qcow2(self) -> bool {
        matches!(self, Self::Qcow2 | Self::Qcow2Extended)
    }

    /// Whether it keeps everything in its own memory.
    fn in_memory(self) -> bool {
        matches!(self, Self::NbdkitMemory | Self::NbdkitMalloc)
    }
}

/// The export of a server.
#[derive(Clone, Debug)]
pub struct Image {
    /// A folder of the server's own in memory, for its socket and its log.
    pub folder: PathBuf,
    /// The file that holds the bytes.
    pub file: PathBuf,
    /// Bytes of the export.
    pub size: u64,
    /// Bytes that blockd's pool has for snapshots.
    pub snapshots: u64,
    /// The medium of blockd's pool; the names of the other servers include theirs.
    pub medium: Medium,
}

/// A server that is running.
#[derive(Debug)]
pub struct Server {
    /// Which.
    pub kind: Kind,
    /// The address of its export.
    pub uri: String,
    /// Its processes.
    pub tree: Tree,
    child: Child,
    /// The process that serves where it is not the child itself.
    daemon: Option<u32>,
    /// Its log file.
    log: PathBuf,
    /// Files that are removed with the server.
    leftover: Vec<PathBuf>,
}

/// How long a server may take until it takes connections, or until it has ended.
const PATIENCE: Duration = Duration::from_secs(60);

impl Server {
    /// Starts one on an image that is there already, or on an empty one of its own. `blockd` is the
    /// daemon's program.
    pub fn start(kind: Kind, image: &Image, blockd: &Path) -> Result<Self> {
        fs::create_dir_all(&image.folder)?;
        if kind == Kind::Blockd {
            return ours::start(image, blockd);
        }
        if !image.file.exists() && !kind.in_memory() {
            make(kind, image)?;
        }
        let socket = image.folder.join("socket");
        let _ = fs::remove_file(&socket);
        let pid_file = image.folder.join("pid");
        let _ = fs::remove_file(&pid_file);
        let mut command = command(kind, image, &socket, &pid_file)?;
        let child = spawn(&mut command, &image.folder)?;
        let export = if kind == Kind::NbdServer { EXPORT } else { "" };
        let mut server = Self::new(kind, child, uri(export, &socket), &image.folder);
        server.await_socket(&socket)?;
        if kind == Kind::NbdServer {
            let pid = read_pid(&pid_file)?;
            server.daemon = Some(pid);
            server.tree = Tree::new(pid);
        }
        Ok(server)
    }

    pub(super) fn new(kind: Kind, child: Child, uri: String, folder: &Path) -> Self {
        let tree = Tree::new(child.id());
        Self { kind, uri, tree, child, daemon: None, log: folder.join(LOG), leftover: Vec::new() }
    }

    /// Marks the image for removal when the server ends.
    #[must_use]
    pub fn with_image_removed(mut self, image: &Image) -> Self {
        self.leftover.push(image.file.clone());
        self
    }

    /// Waits until something takes connections on the socket.
    pub(super) fn await_socket(&mut self, socket: &Path) -> Result<()> {
        let clock = Clock::start();
        while UnixStream::connect(socket).is_err() {
            // nbd-server leaves a daemon behind.
            if let Some(status) = self.child.try_wait()?
                && !(status.success() && self.kind == Kind::NbdServer)
            {
                bail!("ended: {status}: {}", self.words());
            }
            let waited = clock.seconds();
            ensure!(waited < PATIENCE.as_secs_f64(), "no connections: {}", self.words());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Its name and the end of its log, for an error.
    #[must_use]
    pub fn words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let end = &lines[lines.len().saturating_sub(5)..];
        format!("{}: {}", self.kind.name(), end.join(" / "))
    }

    fn end(&mut self) -> Result<()> {
        if let Some(daemon) = self.daemon {
            // It ignores the first signal without a connection.
            for pid in Tree::new(daemon).pids()? {
                let _ = kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL);
            }
        }
        let _ = kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM);
        let clock = Clock::start();
        while self.child.try_wait()?.is_none() {
            if clock.seconds() > PATIENCE.as_secs_f64() {
                eprintln!("note: {} did not end on SIGTERM", self.kind.name());
                self.child.kill()?;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("note: {}: {error:#}", self.kind.name());
        }
        for file in &self.leftover {
            let _ = fs::remove_file(file);
        }
    }
}

/// nbd-server's export.
const EXPORT: &str = "export";
/// The log of a server, beside its image.
const LOG: &str = "log";

/// The address of an export on a Unix socket.
#[must_use]
pub fn uri(export: &str, socket: &Path) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}

/// Starts a program whose words go to a file in the folder.
pub(super) fn spawn(command: &mut Command, folder: &Path) -> Result<Child> {
    let log = fs::OpenOptions::new().create(true).append(true).open(folder.join(LOG))?;
    let program = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().with_context(|| format!("{program}: `cargo ci bench nbd` installs it"))
}

/// Makes an image.
fn make(kind: Kind, image: &Image) -> Result<()> {
    if !kind.is_qcow2() {
        let file = fs::File::create(&image.file)?;
        return Ok(file.set_len(image.size)?);
    }
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    if kind == Kind::Qcow2Extended {
        // As its documentation has it: sub-clusters of 4 KiB in clusters of 128 KiB.
        command.args(["-o", "extended_l2=on,cluster_size=128k"]);
    }
    let output = command.arg(&image.file).arg(image.size.to_string()).output();
    let output = output.context("qemu-img: `cargo ci bench nbd` installs it")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img: {errors}");
    Ok(())
}

/// The first bytes of an empty qcow2 image: all of it.
pub(super) fn qcow2_header(kind: Kind, folder: &Path, size: u64) -> Result<Vec<u8>> {
    let (folder, file) = (folder.to_owned(), folder.join("empty.qcow2"));
    let image = Image { folder, file, size, snapshots: 0, medium: Medium::Disk };
    make(kind, &image)?;
    let bytes = fs::read(&image.file)?;
    fs::remove_file(&image.file)?;
    Ok(bytes)
}

fn command(kind: Kind, image: &Image, socket: &Path, pid_file: &Path) -> Result<Command> {
    let path = &image.file;
    let qemu = |format: &str, cache: &str, aio: &str| {
        let mut command = Command::new("qemu-nbd");
        command.args(["--persistent", "--shared=0", "--discard=unmap"]);
        command.args([format!("--format={format}"), format!("--cache={cache}")]);
        command.arg(format!("--aio={aio}")).arg("--socket").arg(socket).arg(path);
        command
    };
    let storage_daemon = |direct: &str| {
        let mut command = Command::new("qemu-storage-daemon");
        let file = format!(
            "driver=file,node-name=file,filename={},aio=io_uring,cache.direct={direct},\
             discard=unmap",
            path.display()
        );
        command.args(["--blockdev", &file, "--blockdev", "driver=raw,node-name=raw,file=file"]);
        command.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
        command.args(["--export", "type=nbd,id=e,node-name=raw,name=,writable=on"]);
        command
    };
    let nbdkit = |arguments: &[String]| {
        let mut command = Command::new("nbdkit");
        command.arg("--foreground").arg("--unix").arg(socket).args(arguments);
        command
    };
    let text = path.display().to_string();
    Ok(match kind {
        Kind::Blockd => bail!("blockd is started elsewhere"),
        Kind::QemuRaw => qemu("raw", "writeback", "io_uring"),
        Kind::QemuDirect => qemu("raw", "none", "io_uring"),
        Kind::QemuNative => qemu("raw", "none", "native"),
        Kind::Qcow2 | Kind::Qcow2Extended => qemu("qcow2", "none", "io_uring"),
        Kind::StorageDaemon => storage_daemon("off"),
        Kind::StorageDaemonDirect => storage_daemon("on"),
        Kind::NbdkitFile => nbdkit(&["file".to_owned(), text]),
        Kind::NbdkitMemory => nbdkit(&["memory".to_owned(), image.size.to_string()]),
        Kind::NbdkitMalloc => {
            let size = image.size.to_string();
            nbdkit(&["memory".to_owned(), size, "allocator=malloc".to_owned()])
        }
        Kind::NbdServer => {
            let configuration = image.folder.join("nbd-server.conf");
            fs::write(&configuration, nbd_server_configuration(path, socket))?;
            let mut command = Command::new("nbd-server");
            command.arg("-C").arg(configuration).arg("-p").arg(pid_file);
            command
        }
    })
}

/// `port` is there because 0 would mean that the client is on standard input.
fn nbd_server_configuration(path: &Path, socket: &Path) -> String {
    format!(
        "[generic]\nunixsock = {}\nlistenaddr = 127.0.0.1\nport = 10899\n[{EXPORT}]\nexportname = \
         {}\nflush = true\nfua = true\ntrim = true\n",
        socket.display(),
        path.display()
    )
}

fn read_pid(path: &Path) -> Result<u32> {
    let clock = Clock::start();
    loop {
        let text = fs::read_to_string(path).unwrap_or_default();
        if let Ok(pid) = text.trim().parse() {
            return Ok(pid);
        }
        ensure!(clock.seconds() < PATIENCE.as_secs_f64(), "no process id in {}", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}
