//! Three machines on a network of their own: an array, and two hosts that share its disk.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use blockd_testkit::folder::Folder;
use blockd_testkit::tools;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::super::{INSIDE, Run, sparse};
use super::blocks::FLUSHED;
use super::machine::Machine;
use crate::vm::{Drive, Network, Running, Vm, Which};

/// Bytes of the shared disk.
const DISK: u64 = 4 << 30;
/// Bytes of a machine's own disk: a host's has the daemon's state, the array's its reservations.
const OWN: u64 = 64 << 20;
/// Addresses are of a range that no network has: the machines have only each other.
const ARRAY: &str = "192.0.2.1";
/// Names of the hosts.
const HOSTS: [&str; 2] = ["a", "b"];
/// A host writes for at least and at most this long before its power is cut.
const WRITES_MILLIS: std::ops::Range<u64> = 500..5_000;
/// A round takes no longer: the longest wait in one is that for a dead host's lease.
const ROUND: Duration = Duration::from_secs(4 * 60);
/// Seconds that sanlock gives a request. It counts a host as dead after 8 times as many and 60.
const IO_TIMEOUT: u32 = 10;
/// A host tries for ten minutes to reach the array again.
const NVME_TIMES: &str = "keep_alive_tmo=5,reconnect_delay=1,ctrl_loss_tmo=600";
/// Debian packages of the hosts.
const PACKAGES: [&str; 5] = ["sanlock", "lvm2", "lvm2-lockd", "dmsetup", "open-iscsi"];

/// The machines. The disk is a file here, so that it outlives the array's machine.
#[derive(Debug)]
pub(super) struct Lab {
    pub(super) array: Machine,
    pub(super) hosts: [Machine; 2],
    pub(super) network: Network,
    run: Run,
    /// Each machine is stopped after this.
    limit: Duration,
    /// Each host's key, once it has registered.
    keys: [u64; 2],
    /// Files that outlive machines: the shared disk, and a disk of each machine's own.
    folder: Folder,
}

impl Lab {
    /// Boots all, with time for some rounds, and connects the hosts to the array.
    pub(super) fn start(run: &Run, rounds: u64) -> Result<Self> {
        let limit = run.limit() + ROUND * u32::try_from(rounds)?;
        let folder = Folder::new("hosts")?;
        sparse(&folder, "disk", DISK)?;
        certificates(folder.path())?;
        let network = Network::new(3)?;
        let own = [0, 1, 2].map(|id| sparse(&folder, &format!("own-{id}"), OWN));
        own.into_iter().collect::<Result<Vec<_>>>()?;
        let mut array = array(run, limit, &network, &folder)?;
        array.ok("array")?;
        let boot = |id: usize| host(run, limit, &network, &folder, id);
        let booted = std::thread::scope(|scope| {
            let threads = [1, 2].map(|id| scope.spawn(move || boot(id)));
            threads.map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a boot panicked"))))
        });
        let [a, b] = booted;
        let mut hosts = [a?, b?];
        for host in &mut hosts {
            host.ok("storage")?;
        }
        Ok(Self { array, hosts, network, run: *run, limit, keys: [1, 2], folder })
    }

    /// Starts lock managers and daemons, and makes a volume group of the disk. In it is a cell
    /// `one`, which the first host has, with a volume. A host registers its key before its lock
    /// manager writes: the reservation of the first one keeps all others from the disk.
    pub(super) fn serve(&mut self) -> Result<()> {
        self.hosts[0].ok("locks && vgcreate --shared vg $DISK")?;
        self.hosts[0].ok("serve && blockd vg add vg")?;
        self.hosts[1].ok("locks && join")?;
        let host = &mut self.hosts[0];
        host.ok("blockd cell create --size 64M vg/one")?;
        host.ok("blockd add --ublk --pool one --size 16M vol && blocks $VOLUME fill 1 && detach")?;
        Ok(())
    }

    /// Draws one of the hosts. If the other one has the cell, it is handed over.
    pub(super) fn give(&mut self, owner: usize, rng: &mut fastrand::Rng) -> Result<usize> {
        let drawn = usize::from(rng.bool());
        if drawn != owner {
            self.hosts[owner].ok("blockd cell release vg/one")?;
            self.hosts[drawn].ok("blockd cell take vg/one")?;
        }
        Ok(drawn)
    }

    /// Cuts a host's power while it writes and flushes, and returns the number of the last write
    /// that it had flushed.
    pub(super) fn cut_while_writing(
        &mut self,
        number: usize,
        rng: &mut fastrand::Rng,
    ) -> Result<u64> {
        let host = &mut self.hosts[number];
        host.ok("attach && blocks $VOLUME fill")?;
        host.begin("blocks $VOLUME flushing", FLUSHED)?;
        std::thread::sleep(Duration::from_millis(rng.u64(WRITES_MILLIS)));
        let said = host.cut()?;
        let last = said.lines().rev().find_map(|line| line.strip_prefix(FLUSHED));
        Ok(last.context("no write was flushed")?.trim().parse()?)
    }

    /// Lets a host fence the other one and take its cell, and returns the seconds that it took.
    pub(super) fn take_over(&mut self, host: usize) -> Result<f64> {
        self.hosts[host].seconds("blockd cell take --fence vg/one")
    }

    /// Boots a host whose power was cut, until its daemon serves.
    pub(super) fn boot(&mut self, number: usize) -> Result<()> {
        let booted = host(&self.run, self.limit, &self.network, &self.folder, number + 1);
        self.hosts[number] = booted?;
        self.hosts[number].ok("storage && locks && join").map(|_| ())
    }

    /// Cuts the array's power, and boots it again with its disks.
    pub(super) fn reset_array(&mut self) -> Result<()> {
        self.array.cut()?;
        self.array = array(&self.run, self.limit, &self.network, &self.folder)?;
        self.array.ok("array").map(|_| ())
    }

    /// Registers a key of each host, and makes the reservation.
    pub(super) fn register(&mut self) -> Result<()> {
        for (host, key) in self.hosts.iter_mut().zip(self.keys) {
            host.ok(&format!("reservation register {key}"))?;
        }
        let key = self.keys[0];
        self.hosts[0].ok(&format!("reservation reserve {key}")).map(|_| ())
    }

    /// Has a host's key removed by the other one.
    pub(super) fn fence(&mut self, victim: usize) -> Result<()> {
        let (own, lost) = (self.keys[1 - victim], self.keys[victim]);
        self.hosts[1 - victim].ok(&format!("reservation fence {own} {lost}")).map(|_| ())
    }

    /// Registers a key that no host had before for a host that has none.
    pub(super) fn register_anew(&mut self, number: usize) -> Result<()> {
        self.keys[number] = self.keys[0].max(self.keys[1]) + 1;
        let key = self.keys[number];
        self.hosts[number].ok(&format!("reservation register {key}")).map(|_| ())
    }

    /// The array, then the hosts.
    pub(super) fn machine(&mut self, number: usize) -> &mut Machine {
        if number == 0 { &mut self.array } else { &mut self.hosts[number - 1] }
    }

    /// The same, to be stopped and set going again.
    pub(super) fn running(&self, number: usize) -> &Running {
        let machine = if number == 0 { &self.array } else { &self.hosts[number - 1] };
        machine.running()
    }

    /// Ends all machines in order, the array last.
    pub(super) fn end(self) -> Result<()> {
        for host in self.hosts {
            host.end()?;
        }
        self.array.end()
    }
}

/// How hosts reach the array, and the disk's name there.
fn transport(kernel: Which) -> (&'static str, &'static str) {
    match kernel {
        Which::Older => ("iscsi", "/dev/sda"),
        Which::Newer => ("nvme", "/dev/nvme0n1"),
    }
}

/// How lvmlockd is started: Debian 12's, 2.03.16, or Debian 13's, 2.03.31.
fn adopt(kernel: Which) -> &'static str {
    match kernel {
        Which::Older => "--adopt 1",
        Which::Newer => "",
    }
}

/// Certificates of all hosts, of one authority, in a folder.
fn certificates(folder: &Path) -> Result<()> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    fs::write(folder.join("ca.pem"), authority.pem())?;
    for id in 1..=HOSTS.len() {
        let key = KeyPair::generate()?;
        let params = CertificateParams::new(vec![address(id)])?;
        fs::write(folder.join(format!("{id}.pem")), params.signed_by(&key, &authority)?.pem())?;
        fs::write(folder.join(format!("{id}.key")), key.serialize_pem())?;
    }
    Ok(())
}

/// The address of a machine, by its port of the network.
fn address(port: usize) -> String {
    format!("192.0.2.{}", port + 1)
}

/// A machine with an address.
fn machine(
    run: &Run,
    limit: Duration,
    network: &Network,
    (name, port): (&str, usize),
) -> (Vm, String) {
    let vm = Vm::new(&format!("hosts-{name}"))
        .kernel(run.kernel)
        .cpus(1)
        .memory(768)
        .limit(limit)
        .network(network, port);
    let (transport, disk) = transport(run.kernel);
    let (hosts, adopt) = (HOSTS.join(" "), adopt(run.kernel));
    let script = format!(
        "put() {{ echo \"$1\" >\"$2\"; }}\n\
         NAME={name}; ARRAY={ARRAY}; TRANSPORT={transport}; DISK={disk}\n\
         HOSTS='{hosts}'; ADOPT='{adopt}'; HOST_ID={port}; IO_TIMEOUT={IO_TIMEOUT}; NVME_TIMES={NVME_TIMES}\n\
         ADDRESS={0}; hostname {name}; ip addr add {0}/24 dev eth0; ip link set eth0 up\n",
        address(port)
    );
    (vm, script)
}

fn array(run: &Run, limit: Duration, network: &Network, folder: &Folder) -> Result<Machine> {
    let (vm, script) = machine(run, limit, network, ("array", 0));
    let modules: &[&str] = match run.kernel {
        Which::Older => &["configfs", "target_core_mod", "target_core_iblock", "iscsi_target_mod"],
        Which::Newer => &["configfs", "nvmet", "nvmet-tcp"],
    };
    let vm = vm
        .modules(modules)
        .modules(&["ext4"])
        .programs(&["mkfs.ext4"])
        .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
        .drive(Drive::File(folder.path().join("disk")))
        .drive(Drive::File(folder.path().join("own-0")));
    Machine::boot("array", &vm, &format!("{script}{}", include_str!("target.sh")))
}

fn host(
    run: &Run,
    limit: Duration,
    network: &Network,
    folder: &Folder,
    id: usize,
) -> Result<Machine> {
    let name = HOSTS[id - 1];
    let (vm, script) = machine(run, limit, network, (name, id));
    let modules: &[&str] = match run.kernel {
        Which::Older => &["iscsi_tcp", "sd_mod"],
        Which::Newer => &["nvme-tcp"],
    };
    let vm = vm
        .modules(modules)
        .modules(&["dm-mod", "softdog", "ublk_drv"])
        .program(&tools::blockd()?)
        .modules(&["ext4"])
        .programs(&["mkfs.ext4"])
        .file("/etc/mke2fs.conf".as_ref(), "/etc/mke2fs.conf", false)
        .drive(Drive::File(folder.path().join(format!("own-{id}"))))
        .file(&folder.path().join("ca.pem"), "/etc/blockd/ca.pem", false)
        .file(&folder.path().join(format!("{id}.pem")), "/etc/blockd/host.pem", false)
        .file(&folder.path().join(format!("{id}.key")), "/etc/blockd/host.key", false)
        .packages(&PACKAGES)
        .file(&std::env::current_exe()?, INSIDE, true);
    Machine::boot(name, &vm, &format!("{script}{}", include_str!("host.sh")))
}
