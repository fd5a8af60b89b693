//! A daemon with two workers, two pools in files and three ways to reach it.

use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_testkit::daemon::{Daemon, Settings};
use blockd_testkit::folder::Folder;
use blockd_testkit::{http, tools};
use clap::ValueEnum;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Serialize;

use super::client::{self, Address, Client, Manner, Request, WRITE};

const MIB: u64 = 1 << 20;
/// Bytes of the pool of victims; its file is sparse. First writes of a run take up to a third of it
/// on a fast machine, so that the pool never slows them down for being nearly full.
const POOL: u64 = 1 << 40;
/// Bytes of the pool that is full.
const SMALL_POOL: u64 = 64 * MIB;
/// Bytes of each volume. All are thin, and long enough for requests over several TiB.
pub(super) const VOLUME: u64 = 8 << 40;
/// Bytes at the start of a volume that are written, for reads and overwrites.
pub(super) const WRITTEN: u64 = 32 * MIB;
/// Bytes that the pools allocate at once.
pub(super) const EXTENT: u64 = 256 << 10;
/// Blocks that make the description of a volume long, and how far they are apart: 64 GiB in all.
const SCATTERED: u64 = 256;
const DISTANCE: u64 = 256 * MIB;
/// Where first writes begin in a volume.
const FIRST_WRITES: u64 = 1 << 40;

/// The volume of victims.
pub(super) const VICTIM: &str = "victim";
/// The volume of attackers and of the well-behaved neighbour, in the same pool.
pub(super) const NEIGHBOUR: &str = "neighbour";
/// By how much a resize grows a volume.
const STEP: u64 = MIB;
/// The pool that is full, and its volume.
pub(super) const FULL_POOL: &str = "full";
pub(super) const FULL: &str = "full";

/// A request of the setup that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// How clients reach the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    Unix,
    Tcp,
    Tls,
}

impl Transport {
    /// Its name on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
        }
    }
}

/// Certificates of a server and the authority that signed them.
#[derive(Debug)]
pub(super) struct Identity {
    folder: Folder,
    client: Arc<ClientConfig>,
}

impl Identity {
    pub(super) fn new() -> Result<Self> {
        let folder = Folder::new("tls")?;
        tools::shell(&format!(
            "cd {} && exec 2>&1
             ec='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
             openssl req -x509 $ec -days 2 -subj /CN=ca -keyout ca.key -out ca.pem
             openssl req $ec -subj /CN=localhost -keyout server.key -out server.csr
             echo subjectAltName=DNS:localhost >server.ext
             openssl x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
                 -extfile server.ext -out server.pem",
            folder.path().display()
        ))?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(folder.path().join("ca.pem"))?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let client = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { folder, client: Arc::new(client) })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// A daemon that serves.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) daemon: Daemon,
    /// Where metrics and readiness are served.
    pub(super) metrics: SocketAddrV4,
    unix: Address,
    tcp: Address,
    tls: Address,
    /// Number of the next extent for a first write, over all volumes.
    first: AtomicU64,
    /// Steps that volumes were resized by.
    sizes: AtomicU64,
    _pools: Folder,
}

impl Site {
    /// Starts a daemon and makes what attacks need: a volume for victims, one for the neighbour,
    /// and a full pool.
    ///
    /// # Errors
    /// When the daemon does not start or refuses.
    pub(super) fn start(
        program: Option<&Path>,
        folder: Option<&Path>,
        identity: &Identity,
    ) -> Result<Self> {
        let pools = match folder {
            Some(folder) => Folder::below(folder, "pools")?,
            None => Folder::new("pools")?,
        };
        let mut settings = Settings {
            program: program.map(Path::to_path_buf),
            pool: Some(pools.path().join("pool")),
            pool_size: POOL,
            ..Settings::default()
        };
        let mut daemon = Daemon::new("near", &settings)?;
        let full = pools.path().join("full");
        let volatile = statfs(pools.path())?.filesystem_type() == TMPFS_MAGIC;
        settings.pool_lines = format!(
            "[[pool]]\nname = {FULL_POOL:?}\npath = {full:?}\nsize = {SMALL_POOL}\n\
             volatile = {volatile}\n[pool.space]\nlow = \"off\"\nvery_low = \"off\"\n"
        );
        settings.tables = format!(
            "[workers]\ncount = 2\n[metrics]\naddress = \"127.0.0.1:0\"\n\
             [nbd.tls]\ncertificate = {:?}\nkey = {:?}\n\
             [[nbd.listener]]\nunix = {:?}\n\
             [[nbd.listener]]\ntcp = \"127.0.0.1:0\"\n\
             [[nbd.listener]]\ntcp = \"127.0.0.1:0\"\ntls = \"required\"\n",
            identity.file("server.pem"),
            identity.file("server.key"),
            daemon.nbd_socket(),
        );
        daemon.configure(&settings)?;
        daemon.start()?;
        for volume in [VICTIM, NEIGHBOUR] {
            for name in [volume, &spare(volume)] {
                daemon.cli(&["add", "--nbd", "--size", &VOLUME.to_string(), name])?;
            }
        }
        let (tcp, tls) = listeners(&daemon)?;
        let site = Self {
            metrics: daemon.metrics_address()?.parse()?,
            unix: Address::Unix(daemon.nbd_socket()),
            tcp: Address::Tcp(tcp),
            tls: Address::Tls(tls, Arc::clone(&identity.client)),
            daemon,
            first: AtomicU64::new(0),
            sizes: AtomicU64::new(1),
            _pools: pools,
        };
        site.fill(VICTIM, WRITTEN)?;
        site.fill(NEIGHBOUR, 2 * WRITTEN)?;
        site.fill_pool()?;
        Ok(site)
    }

    /// Where this transport leads.
    pub(super) const fn address(&self, transport: Transport) -> &Address {
        match transport {
            Transport::Unix => &self.unix,
            Transport::Tcp => &self.tcp,
            Transport::Tls => &self.tls,
        }
    }

    /// A place of a volume that was never written, in an extent of its own.
    pub(super) fn first(&self) -> u64 {
        FIRST_WRITES + self.first.fetch_add(1, Ordering::Relaxed) * EXTENT
    }

    /// A size that is larger than each one before.
    pub(super) fn next_size(&self) -> u64 {
        VOLUME + self.sizes.fetch_add(1, Ordering::Relaxed) * STEP
    }

    fn client(&self, export: &str) -> Result<Client> {
        Client::open(&self.unix, export, Manner::victim(PATIENCE))
    }

    /// Writes the first bytes of a volume.
    fn fill(&self, volume: &str, bytes: u64) -> Result<()> {
        let mut client = self.client(volume)?;
        let data = vec![0x5a; usize::try_from(MIB)?];
        for offset in (0..bytes).step_by(data.len()) {
            client.ask(Request { kind: WRITE, offset, len: MIB }, &data, &mut [])?;
        }
        Ok(())
    }

    /// Writes a block here and there, so that a description of the volume from `offset` on is many
    /// ranges, and takes a look at many extents.
    pub(super) fn scatter(&self, volume: &str, offset: u64) -> Result<()> {
        let mut client = self.client(volume)?;
        let data = [0x5a; 4096];
        for number in 0..SCATTERED {
            let offset = offset + number * DISTANCE;
            client.ask(Request { kind: WRITE, offset, len: 4096 }, &data, &mut [])?;
        }
        Ok(())
    }

    /// Writes to the small pool until it refuses, then lets further writes wait.
    fn fill_pool(&self) -> Result<()> {
        let size = VOLUME.to_string();
        let add = ["add", "--nbd", "--pool", FULL_POOL, "--on-full", "error", "--size", &size];
        self.daemon.cli(&[&add[..], &[FULL]].concat())?;
        let mut client = self.client(&export(FULL))?;
        let data = vec![0x5a; usize::try_from(EXTENT)?];
        let (limit, mut offset) = (2 * SMALL_POOL, 0);
        loop {
            ensure!(offset < limit, "a pool of {SMALL_POOL} bytes took {offset} bytes");
            client.send(Request { kind: WRITE, offset, len: EXTENT }, &data)?;
            if client.answer(&mut [])? != 0 {
                break;
            }
            offset += EXTENT;
        }
        self.daemon.cli(&["set", "--pool", FULL_POOL, "--on-full", "block", FULL]).map(|_| ())
    }

    /// The daemon's answer to a request for a path of its metrics port.
    ///
    /// # Errors
    /// When it does not answer with 200 in time.
    pub(super) fn get(&self, path: &str, patience: Duration) -> Result<String> {
        let stream = client::tcp(self.metrics, client::VICTIM, Some(patience))?;
        let (status, body) = http::get(stream, path)?;
        ensure!(status == 200, "{path}: {status}");
        Ok(body)
    }

    /// How many writes wait for space in the full pool; `None` if none does.
    pub(super) fn waiting_writes(&self) -> Result<Option<u64>> {
        let line = format!("blockd_blocked_writes{{pool=\"{FULL_POOL}\",volume=\"{FULL}\"}} ");
        let metrics = self.get("/metrics", PATIENCE)?;
        let value = metrics.lines().find_map(|found| found.strip_prefix(line.as_str()));
        let count: u64 = value.context("no metric of waiting writes")?.parse()?;
        Ok((count > 0).then_some(count))
    }

    /// Open descriptors of the daemon.
    pub(super) fn descriptors(&self) -> Result<usize> {
        let pid = self.daemon.pid().context("the daemon does not run")?;
        Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
    }

    /// A command for a verb of the command line, which waits this long for the daemon.
    pub(super) fn verb(&self, limit: Duration, words: &[&str]) -> Command {
        let mut command = self.daemon.program_command();
        command.env("BLOCKD_SOCKET", self.daemon.control_socket());
        command.args(["--timeout", &format!("{}ms", limit.as_millis())]).args(words);
        command
    }
}

/// The volume beside another one that its clients resize.
pub(super) fn spare(volume: &str) -> String {
    format!("{volume}-spare")
}

/// The export name of a volume of the full pool.
pub(super) fn export(volume: &str) -> String {
    format!("{FULL_POOL}/{volume}")
}

/// The addresses of the listeners without and with TLS, as the daemon names them.
fn listeners(daemon: &Daemon) -> Result<(SocketAddrV4, SocketAddrV4)> {
    let shown = daemon.cli(&["show", VICTIM])?;
    let uris = shown["volume"]["nbd_uris"].as_array().context("no NBD URIs")?;
    let find = |scheme: &str| -> Result<SocketAddrV4> {
        let rest = uris.iter().find_map(|uri| uri.as_str()?.strip_prefix(scheme));
        let address = rest.and_then(|rest| rest.split('/').next()).context("no such listener")?;
        address.parse().with_context(|| format!("{scheme}{address}"))
    };
    Ok((find("nbd://")?, find("nbds://")?))
}
