//! A lock manager that was started anew has no leases until they are given to it. The texts are
//! those of LVM 2.03.31.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use blockd_media::program::Ended;
use parking_lot::Mutex;

use crate::cell::{CellName, HostNumber};
use crate::coordinator::Coordinator as _;
use crate::error::HostsError;

use super::command::Commands;
use super::tests::{GROUP, VOLUMES};
use super::{Lvm, lease};

/// Sanlock's own lines, and the leases of `cell-one`, of `cell-two` and of another group.
const STATUS: &str = "\
daemon a
p -1 helper
s lvm_san:1:/dev/mapper/san-lvmlock:0
s lvm_left:1:/dev/mapper/left-lvmlock:0 REM
r lvm_san:g-h-i:/dev/mapper/san-lvmlock:72351744:1 p 139 ORPHAN
r lvm_san:a-b-c:/dev/mapper/san-lvmlock:70254592:1 p 139 ORPHAN
r lvm_sand:x-y-z:/dev/mapper/sand-lvmlock:70254592:1 p 139 ORPHAN
";

/// Lines of `sanlock client status -D` about the daemon and a lockspace: the membership was renewed
/// 7 s ago.
const DETAILS: [(&str, &str); 2] = [
    (
        "daemon a",
        "    our_host_name=a\n    io_timeout=20\n    monotime=1007\n    version_str=3.8.5\n",
    ),
    (
        "s lvm_san:1:/dev/mapper/san-lvmlock:0",
        "    list=spaces\n    io_timeout=10\n    renewal_last_attempt=1005\n    \
         renewal_last_success=1000\n",
    ),
];

/// Names of logical volumes, as LVM and sanlock have them.
const NAMES: [(&str, &str); 2] = [("san/cell-one", "g-h-i"), ("san/cell-two", "a-b-c")];

#[derive(Default)]
struct Host {
    is_started: bool,
    /// A change of the former lock manager's has left the group's lock.
    is_group_locked: bool,
    /// The lock manager takes over no lease.
    is_deaf: bool,
    /// Sanlock does not answer.
    is_blind: bool,
    /// Sanlock has no lease of `cell-one`, whose device is there.
    is_lost: bool,
    /// The holder of a lease on the disk, as sanlock gives it; empty: this host.
    leader: &'static str,
    /// The lock manager is not to be had, also after its lockspace was started.
    is_dead: bool,
    /// LVM can't read the table of a device anew.
    is_stale: bool,
    /// Sanlock gives no details.
    is_terse: bool,
    /// Leases that the lock manager has, of logical volumes.
    leases: Vec<String>,
    lines: Vec<String>,
}

const OWN: &str = "owner_id 1\nowner_generation 3\ntimestamp 4711";
const OTHERS: &str = "owner_id 2\nowner_generation 3\ntimestamp 4711";
const FREE: &str = "owner_id 1\nowner_generation 3\ntimestamp 0";

impl Host {
    fn status(&self) -> String {
        let mut status = STATUS.to_owned();
        for (_, uuid) in NAMES.iter().filter(|(name, _)| self.leases.iter().any(|one| one == name))
        {
            let line = status.lines().find(|line| line.contains(uuid)).unwrap();
            status = status.replace(line, &line.replace(" ORPHAN", ""));
        }
        if self.is_lost {
            status = status
                .lines()
                .filter(|line| !line.contains("g-h-i"))
                .fold(String::new(), |text, line| text + line + "\n");
        }
        if self.is_group_locked {
            status += "r lvm_san:VGLK:/dev/mapper/san-lvmlock:66060288:3 p 139 ORPHAN\n";
        }
        status
    }

    /// The output of a command, or its error.
    fn answer(&mut self, name: &str, words: &[&str]) -> Result<String, String> {
        self.lines.push(format!("{name} {}", words.join(" ")));
        let last = *words.last().unwrap();
        let adopts = words.windows(2).any(|pair| pair == ["--lockopt", "adopt"]);
        match name {
            "sanlock" if self.is_blind => return Err("connect failed".to_owned()),
            "sanlock" if words[0] == "direct" => {
                let leader = if self.leader.is_empty() { OWN } else { self.leader };
                return Ok(format!("sector_size 512\nmax_hosts 2000\n{leader}\n"));
            }
            "sanlock" if words.contains(&"-D") && !self.is_terse => {
                let detailed = |line: &str| {
                    let details = DETAILS.iter().find(|(of, _)| *of == line);
                    format!("{line}\n{}", details.map_or("", |(_, lines)| lines))
                };
                return Ok(self.status().lines().map(detailed).collect());
            }
            "sanlock" => return Ok(self.status()),
            "dmsetup" if words[0] == "info" => return Ok("LVM-xyzghi\n".to_owned()),
            "dmsetup" => return Ok(String::new()),
            "vgs" => return Ok(GROUP.to_owned()),
            _ if self.is_dead => return Err("  Global lock failed: error -210".to_owned()),
            "vgchange" if adopts && words[0] == "--lockstart" => self.is_started = true,
            _ if !self.is_started => return Err("  Global lock failed: error -210".to_owned()),
            "vgchange" if adopts => self.is_group_locked = false,
            _ if self.is_group_locked => {
                return Err("  VG san lock failed: orphan lock needs to be adopted.".to_owned());
            }
            "lvs" => return Ok(VOLUMES.to_owned()),
            "lvchange" if adopts && !self.is_deaf => self.leases.push(last.to_owned()),
            "lvchange" if self.is_stale && words[0] == "--refresh" => {
                return Err("  Failed to reactivate LV: san/cell-one".to_owned());
            }
            "lvchange" if self.is_lost => {}
            // It is not refused, and leaves an orphan.
            "lvchange" if words[0] == "-an" => {}
            _ if !self.leases.iter().any(|lease| lease == last) => {
                return Err(format!("  LV {last} lock failed: orphan lock needs to be adopted."));
            }
            _ => {}
        }
        Ok(String::new())
    }
}

/// A host of the group after its lock manager was started anew.
fn restarted() -> (Lvm, Arc<Mutex<Host>>) {
    let host: Arc<Mutex<Host>> = Arc::default();
    let shared = Arc::clone(&host);
    let commands = Commands::new(move |name, words| {
        let answer = shared.lock().answer(name, words);
        let code = if answer.is_ok() { 0 } else { 5 };
        Ok(Ended {
            status: Some(ExitStatus::from_raw(code << 8)),
            errors: answer.as_ref().err().cloned().unwrap_or_default(),
            output: answer.unwrap_or_default(),
            took: Duration::ZERO,
        })
    });
    (Lvm::with("san", commands), host)
}

#[test]
fn a_cell_grows_after_the_lock_manager_was_started_anew() {
    for is_group_locked in [false, true] {
        let (lvm, host) = restarted();
        host.lock().is_group_locked = is_group_locked;
        lvm.extend(&CellName::parse("one").unwrap(), 8 << 20).unwrap();
        let host = host.lock();
        let extended = host.lines.iter().filter(|line| line.starts_with("lvextend")).count();
        assert_eq!(extended, 2, "{:?}", host.lines);
        // Those of other cells are for calls about these.
        assert_eq!(host.leases, ["san/cell-one"]);
    }
}

#[test]
fn each_call_about_a_cell_has_its_lease_taken_over_first() {
    for call in ["acquire", "release", "remove", "mark"] {
        let (lvm, host) = restarted();
        let one = CellName::parse("one").unwrap();
        match call {
            "acquire" => lvm.acquire(&one).map(drop),
            "release" => lvm.release(&one),
            "remove" => lvm.remove(&one),
            _ => lvm.mark_new(&one),
        }
        .unwrap();
        let host = host.lock();
        assert_eq!(host.leases, ["san/cell-one"], "{call}: {:?}", host.lines);
    }
}

/// LVM says that it has ended the use of the logical volume, and the lease stays with the host.
#[test]
fn a_cell_whose_lease_stays_is_not_released() {
    let (lvm, host) = restarted();
    host.lock().is_deaf = true;
    let error = lvm.release(&CellName::parse("one").unwrap()).unwrap_err();
    assert!(matches!(error, HostsError::Away { .. }), "{error}");
    // Nor is one whose lease can't be looked at.
    let (lvm, host) = restarted();
    host.lock().is_started = true;
    host.lock().is_blind = true;
    let error = lvm.release(&CellName::parse("one").unwrap()).unwrap_err();
    assert!(matches!(error, HostsError::Away { .. }), "{error}");
}

#[test]
fn a_host_that_has_left_the_group_does_not_join_it_again() {
    for name in ["other", "left"] {
        let (mut lvm, host) = restarted();
        lvm.name = name.to_owned();
        let error = lvm.acquire(&CellName::parse("one").unwrap()).unwrap_err();
        assert!(matches!(error, HostsError::Away { .. }), "{error}");
        assert!(!host.lock().is_started, "{name}");
    }
    let (lvm, host) = restarted();
    // What its group has of devices can't be asked for here.
    lvm.cut_off().unwrap_err();
    lvm.acquire(&CellName::parse("one").unwrap()).unwrap_err();
    assert!(!host.lock().is_started);
}

/// A daemon that starts opens the cells that are active. lvmlockd gives a lease back if the command
/// that has it taken over is killed, and leaves the device.
#[test]
fn a_lease_that_was_lost_is_taken_again_before_its_cell_is_opened() {
    let one = CellName::parse("one").unwrap();
    for (is_lost, expected) in [(false, [""; 0].as_slice()), (true, &["-aey", "--refresh"])] {
        let (lvm, host) = restarted();
        let leases = vec!["san/cell-one".to_owned()];
        *host.lock() = Host { is_started: true, is_lost, leases, ..Host::default() };
        // One that was taken again may be younger than what another host has seen of it.
        let left = lvm.confirm(&one).unwrap();
        assert_eq!(left.is_zero(), is_lost);
        // Its membership is good for a minute, but the lease was looked at now. A second is for the
        // commands of this test.
        assert!(left <= Duration::from_secs(2 + 1), "{left:?}");
        let host = host.lock();
        let changes = host.lines.iter().filter_map(|line| line.strip_prefix("lvchange "));
        let changes = changes.map(|line| line.trim_end_matches(" san/cell-one"));
        assert_eq!(Vec::from_iter(changes), expected);
    }
}

#[test]
fn a_cell_whose_lease_another_host_has_got_is_not_opened_and_its_device_goes() {
    let one = CellName::parse("one").unwrap();
    let removes = |host: &Host| host.lines.contains(&"dmsetup remove san-cell--one".to_owned());
    let (lvm, host) = restarted();
    *host.lock() = Host { is_started: true, is_lost: true, leader: OTHERS, ..Host::default() };
    let error = lvm.confirm(&one).unwrap_err();
    assert!(matches!(error, HostsError::Held { by: Some(HostNumber(2)), .. }), "{error}");
    assert!(removes(&host.lock()));
    // LVM would give an expired lease, which is no fence: it is not asked.
    assert!(!host.lock().lines.iter().any(|line| line.starts_with("lvchange")));
    // While the lock manager can't be had the cell may be this host's: the device stays.
    let (lvm, host) = restarted();
    *host.lock() = Host { is_lost: true, is_dead: true, ..Host::default() };
    let error = lvm.confirm(&one).unwrap_err();
    assert!(matches!(error, HostsError::Away { .. }), "{error}");
    assert!(!removes(&host.lock()));
    // Where sanlock does not answer, nothing says that the lease was lost.
    let (lvm, host) = restarted();
    *host.lock() = Host { is_blind: true, is_lost: true, ..Host::default() };
    assert_eq!(lvm.confirm(&one).unwrap(), Duration::ZERO);
    let (lvm, host) = restarted();
    let leases = vec!["san/cell-one".to_owned()];
    *host.lock() = Host { is_terse: true, leases, ..Host::default() };
    assert_eq!(lvm.confirm(&one).unwrap(), Duration::ZERO);
    // Nor does one that is free on the disk, or can't be read there.
    for leader in [FREE, "owner_id 1"] {
        let (lvm, host) = restarted();
        let leases = vec!["san/cell-one".to_owned()];
        *host.lock() = Host { is_started: true, leader, leases, ..Host::default() };
        assert_eq!(lvm.confirm(&one).unwrap(), Duration::ZERO);
    }
    // Another host has overwritten it on the disk, where sanlock does not look again.
    let (lvm, host) = restarted();
    let leases = vec!["san/cell-one".to_owned()];
    *host.lock() = Host { is_started: true, leader: OTHERS, leases, ..Host::default() };
    let error = lvm.confirm(&one).unwrap_err();
    assert!(matches!(error, HostsError::Held { by: Some(HostNumber(2)), .. }), "{error}");
    assert!(removes(&host.lock()));
    // Nor does one that the lock manager may be about to give back.
    let (lvm, host) = restarted();
    *host.lock() = Host { is_started: true, ..Host::default() };
    assert_eq!(lvm.confirm(&one).unwrap(), Duration::ZERO);
}

#[test]
fn a_lease_that_is_shared_or_on_its_way_is_not_this_hosts_alone() {
    let is_alone = |line: &str| lease::alone(line, "san", "LVM-xyzghi").is_some();
    let line = "r lvm_san:g-h-i:/dev/mapper/san-lvmlock:72351744:4 p 139";
    let resource = "lvm_san:g-h-i:/dev/mapper/san-lvmlock:72351744";
    assert_eq!(lease::alone(line, "san", "LVM-xyzghi"), Some(resource));
    assert!(!is_alone(&line.replace("g-h-i", "a-b-c")));
    assert!(!is_alone(&line.replace(":4 ", ":SH ")));
    for word in ["ADD", "REM", "ORPHAN"] {
        assert!(!is_alone(&format!("{line} {word}")), "{word}");
    }
}

#[test]
fn a_lease_counts_until_six_times_the_limit_of_io_after_its_renewal() {
    let text = |now: u64, its: &str| {
        format!("daemon a\n    monotime={now}\ns lvm_san:1:/dev/x:0\n{its}s lvm_b:1:/dev/y:0\n")
    };
    let its = |limit: u64, renewed: u64| {
        format!("    io_timeout={limit}\n    renewal_last_success={renewed}\n")
    };
    let left = |text: &str| lease::time_left(text, "san").as_secs();
    assert_eq!(left(&text(100, &its(10, 95))), 55);
    assert_eq!(left(&text(100, &its(5, 95))), 25);
    assert_eq!(left(&text(160, &its(10, 95))), 0);
    // Not renewed yet; without its lines, which are another space's; and one that it leaves.
    assert_eq!(left(&text(40, &its(10, 0))), 0);
    assert_eq!(left(&format!("{}{}", text(100, ""), its(10, 95))), 0);
    // One in which sanlock kills what has leases.
    assert_eq!(left(&text(100, &format!("{}    killing_pids=1\n", its(10, 95)))), 0);
    let leaves = text(100, &its(10, 95)).replace("/dev/x:0", "/dev/x:0 REM");
    assert_eq!(left(&leaves), 0);
    assert_eq!(left(&its(10, 95)), 0);
}

#[test]
fn a_device_whose_table_can_not_be_read_anew_is_not_opened() {
    let (lvm, host) = restarted();
    *host.lock() = Host { is_started: true, is_lost: true, is_stale: true, ..Host::default() };
    lvm.confirm(&CellName::parse("one").unwrap()).unwrap_err();
    assert_eq!(host.lock().lines.last().unwrap(), "lvchange -an san/cell-one");
}
