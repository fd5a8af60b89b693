use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use blockd_media::program::Ended;
use parking_lot::Mutex;

use super::*;

pub(super) const GROUP: &str = r#"{"report":[{"vg":[
  {"vg_name":"san","vg_size":"1073741824","vg_free":"536870912","vg_extent_size":"4194304",
   "vg_lock_type":"sanlock","vg_tags":"blockd.key.1.0xb1000100000007,site,blockd.key.2.0xb1000200000009",
   "pv_name":"/dev/sda","pv_uuid":"two"},
  {"vg_name":"san","vg_size":"1073741824","vg_free":"536870912","vg_extent_size":"4194304",
   "vg_lock_type":"sanlock","vg_tags":"","pv_name":"/dev/sdb","pv_uuid":"one"}]}]}"#;

pub(super) const VOLUMES: &str = r#"{"report":[{"lv":[
  {"lv_name":"cell-two","lv_uuid":"a-b-c","lv_size":"8388608","lv_active_locally":"",
   "lv_path":"/dev/san/cell-two","lv_lockargs":"1.0.0:70254592","lv_tags":"site,blockd.new"},
  {"lv_name":"root","lv_uuid":"d-e-f","lv_size":"4194304","lv_active_locally":"active locally",
   "lv_path":"/dev/san/root","lv_lockargs":"1.0.0:71303168","lv_tags":""},
  {"lv_name":"cell-one","lv_uuid":"g-h-i","lv_size":"4194304",
   "lv_active_locally":"active locally","lv_path":"/dev/san/cell-one",
   "lv_lockargs":"1.0.0:72351744","lv_tags":""}]}]}"#;

const LEADER: &str = "\
magic 0x6152010
sector_size 512
max_hosts 2000
space_name lvm_san
resource_name a-b-c
owner_id 2
owner_generation 3
timestamp 4711
";

const LARGE_LEADER: &str = "\
sector_size 4096
max_hosts 2000
owner_id 2
owner_generation 3
timestamp 4711
";

/// A group whose commands print these texts, by the beginnings of their lines; others end with code
/// 5 and this text. Gives the group and the lines that were run.
fn group(
    answers: &'static [(&'static str, &'static str)],
    error: &'static str,
) -> (Lvm, Arc<Mutex<Vec<String>>>) {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let run = Arc::clone(&lines);
    let commands = Commands::new(move |name, words| {
        let line = format!("{name} {}", words.join(" "));
        let answer = answers.iter().find(|(start, _)| line.starts_with(start));
        run.lock().push(line);
        let code = if answer.is_some() { 0 } else { 5 };
        Ok(Ended {
            status: Some(ExitStatus::from_raw(code << 8)),
            output: answer.map(|(_, text)| (*text).to_owned()).unwrap_or_default(),
            errors: if answer.is_some() { String::new() } else { error.to_owned() },
            took: Duration::ZERO,
        })
    });
    (Lvm::with("san", commands), lines)
}

fn cell(text: &str) -> CellName {
    CellName::parse(text).unwrap()
}

#[test]
fn a_group_names_its_devices_and_the_keys_of_its_hosts() {
    let (lvm, _) = group(&[("vgs", GROUP), ("lvmconfig", "host_id=2")], "");
    let found = lvm.look().unwrap();
    assert_eq!(found.host, HostNumber(2));
    // In the order that all hosts have, whatever their names are here.
    let devices = found.devices.iter().map(|one| (one.id.as_str(), one.path.to_str().unwrap()));
    assert_eq!(Vec::from_iter(devices), [("one", "/dev/sdb"), ("two", "/dev/sda")]);
    assert_eq!(lvm.keys().unwrap(), [Key::new(HostNumber(1), 7), Key::new(HostNumber(2), 9)]);
    assert_eq!(lvm.space().unwrap(), Space { total: 1 << 30, free: 1 << 29 });
}

#[test]
fn a_group_that_is_not_shared_and_a_host_without_a_number_are_refused() {
    const LOCAL: &str = r#"{"report":[{"vg":[{"vg_size":"1","vg_free":"1","vg_extent_size":"1",
        "vg_lock_type":"","vg_tags":"","pv_name":"/dev/sda","pv_uuid":"one"}]}]}"#;
    let (lvm, _) = group(&[("vgs", LOCAL), ("lvmconfig", "host_id=2")], "");
    let error = lvm.look().unwrap_err().to_string();
    assert!(error.contains("has the lock type none: make it shared"), "{error}");
    // The number that sanlock uses counts, and not the one that it would use next.
    const STATUS: &str = "daemon 1.local\np -1 helper\ns lvm_san:7:/dev/mapper/san-lvmlock:0\n";
    let (lvm, _) =
        group(&[("vgs", GROUP), ("lvmconfig", "host_id=2"), ("sanlock client", STATUS)], "");
    assert_eq!(lvm.look().unwrap().host, HostNumber(7));
    let (lvm, _) = group(&[("vgs", GROUP), ("lvmconfig", "host_id=0")], "");
    let error = lvm.look().unwrap_err().to_string();
    assert!(error.contains("set local/host_id"), "{error}");
}

#[test]
fn a_hosts_key_takes_the_place_of_its_former_ones() {
    let (lvm, lines) = group(&[("vgs", GROUP), ("vgchange", "")], "");
    lvm.publish_key(Key::new(HostNumber(2), 10)).unwrap();
    let change = "vgchange --yes --deltag blockd.key.2.0xb1000200000009 \
                  --addtag blockd.key.2.0xb100020000000a san";
    assert_eq!(lines.lock().last().unwrap(), change);
    lvm.publish_key(Key::new(HostNumber(2), 9)).unwrap();
    assert!(lines.lock().last().unwrap().starts_with("vgs"), "nothing is changed");
}

#[test]
fn cells_are_those_volumes_that_have_the_prefix_and_their_leases_say_who_has_them() {
    let (lvm, lines) = group(&[("lvs", VOLUMES), ("sanlock", LEADER)], "");
    let cells = lvm.cells().unwrap();
    let seen: Vec<_> = cells.iter().map(|one| (one.name.as_str(), one.size, one.is_new)).collect();
    assert_eq!(seen, [("one", 4 << 20, false), ("two", 8 << 20, true)]);
    let owner = Owner { host: HostNumber(2), generation: 3 };
    assert_eq!([&cells[0].holder, &cells[1].holder], [&Holder::This, &Holder::Other(owner)]);
    let asked = "sanlock direct read_leader -r lvm_san:a-b-c:/dev/mapper/san-lvmlock:70254592";
    assert_eq!(lines.lock().last().unwrap(), asked);
    assert_eq!(lvm.cell_at(&cells[0].path), Some(cell("one")));
    for other in ["/dev/san/root", "/dev/other/cell-one", "/dev/san/cell-one/x", "cell-one"] {
        assert_eq!(lvm.cell_at(Path::new(other)), None, "{other}");
    }
    // A lease that was given back keeps the name of its last owner.
    let free = LEADER.replace("4711", "0");
    assert_eq!(lease::owner(&free), Ok(None));
    // One that can't be read is not taken for a free one.
    for damaged in ["", "owner_id 2", "owner_id 2\nowner_generation x\ntimestamp 1"] {
        lease::owner(damaged).unwrap_err();
    }
    let (lvm, _) = group(&[("lvs", VOLUMES)], "sanlock is not there");
    let holder = lvm.cells().unwrap().remove(1).holder;
    assert!(matches!(&holder, Holder::Unknown(why) if why.contains("not there")), "{holder:?}");
}

#[test]
fn one_report_shows_a_cell_and_the_keys_of_hosts() {
    const ONE: &str = r#"{"report":[{"lv":[
      {"lv_name":"cell-two","lv_uuid":"a-b-c","lv_size":"8388608","lv_active_locally":"",
       "lv_path":"/dev/san/cell-two","lv_lockargs":"1.0.0:70254592","lv_tags":"",
       "vg_tags":"blockd.key.1.0xb1000100000007,site,blockd.key.2.0xb1000200000009"}]}]}"#;
    let (lvm, lines) = group(&[("lvs", ONE), ("sanlock", LEADER), ("lvchange", "")], "");
    let seen = lvm.look_at(&cell("two")).unwrap().unwrap();
    let owner = Owner { host: HostNumber(2), generation: 3 };
    assert_eq!(seen.cell.holder, Holder::Other(owner));
    assert_eq!(seen.key_of(HostNumber(2)), Some(Key::new(HostNumber(2), 9)));
    assert_eq!(seen.key_of(HostNumber(3)), None);
    let programs = || {
        let lines = std::mem::take(&mut *lines.lock());
        Vec::from_iter(lines.iter().map(|line| line.split(' ').next().unwrap().to_owned()))
    };
    assert!(lines.lock()[0].starts_with("lvs --select lv_name=cell-two "), "{lines:?}");
    assert_eq!(programs(), ["lvs", "sanlock"]);
    let seen = lvm.acquire_and_look(&cell("two")).unwrap();
    assert_eq!(seen.keys, [Key::new(HostNumber(1), 7), Key::new(HostNumber(2), 9)]);
    assert_eq!(programs(), ["dmsetup", "lvchange", "lvs", "sanlock"]);
    assert_eq!(lvm.look_at(&cell("one")).unwrap(), None);
}

#[test]
fn what_lvm_says_is_understood() {
    let held = "LV locked by other host: san/cell-two\n  Failed to lock logical volume.";
    let (lvm, _) = group(&[("lvs", VOLUMES), ("sanlock", LEADER)], held);
    let error = lvm.acquire(&cell("two")).unwrap_err();
    assert_eq!(error.to_string(), "cell two is held by host 2");
    let away = "WARNING: lvmlockd process is not running.\n  Global lock failed: check that \
                lvmlockd is running.";
    let (lvm, _) = group(&[], away);
    let error = lvm.acquire(&cell("two")).unwrap_err();
    assert!(matches!(&error, HostsError::Away { .. }), "{error}");
    assert!(error.to_string().contains("Global lock failed"), "{error}");
    let busy = "Retrying sh lock on VG san\n  VG san lock skipped: held by other host.\n  Cannot \
                access VG san due to failed lock.";
    let (lvm, _) = group(&[], busy);
    let error = lvm.acquire(&cell("two")).unwrap_err();
    assert!(matches!(error, HostsError::Away { .. }), "another host has the group's lock: {error}");
    let (lvm, _) = group(&[], "Failed to find logical volume \"san/cell-no\"");
    let error = lvm.release(&cell("no")).unwrap_err();
    assert!(matches!(error, HostsError::NotFound { .. }), "{error}");
    let (lvm, _) = group(&[], "Logical volume san/cell-one in use.");
    let error = lvm.release(&cell("one")).unwrap_err();
    assert!(matches!(error, HostsError::InUse { .. }), "{error}");
    let (lvm, _) = group(&[], "something new\n  on two lines");
    let error = lvm.release(&cell("one")).unwrap_err().to_string();
    assert_eq!(error, "lvchange -an san/cell-one: something new; on two lines");
}

#[test]
fn a_cell_is_made_for_this_host_alone_and_grows_only_where_it_is_held() {
    let (lvm, lines) = group(&[("vgs", GROUP), ("lvcreate", ""), ("lvs", VOLUMES)], "");
    lvm.create(&cell("one"), (4 << 20) - 1).unwrap();
    let made = "lvcreate --yes -aey -Wy --addtag blockd.new -L 4194304b -n cell-one san";
    assert!(lines.lock().iter().any(|line| line == made), "{:?}", lines.lock());
    let error = lvm.create(&cell("one"), 1 << 30).unwrap_err().to_string();
    assert!(error.contains("no space: 1073741824 bytes needed, 536870912 bytes free"), "{error}");
    let (lvm, lines) = group(&[("vgs", GROUP), ("lvextend", ""), ("lvs", VOLUMES)], "");
    assert_eq!(lvm.extend(&cell("one"), 1 << 20).unwrap(), 4 << 20);
    assert!(matches!(lvm.extend(&cell("two"), 1 << 30), Err(HostsError::NotHeld { .. })));
    assert!(!lines.lock().iter().any(|line| line.starts_with("lvextend")));
    lvm.extend(&cell("one"), 8 << 20).unwrap();
    assert!(lines.lock().iter().any(|line| line == "lvextend --yes -L 8388608b san/cell-one"));
}

#[test]
fn a_cell_that_this_host_has_is_marked_as_new_and_as_made() {
    let (lvm, lines) = group(&[("lvs", VOLUMES), ("lvchange", "")], "");
    lvm.mark_new(&cell("one")).unwrap();
    assert_eq!(lines.lock().last().unwrap(), "lvchange --addtag blockd.new san/cell-one");
    lvm.finish(&cell("one")).unwrap();
    assert_eq!(lines.lock().last().unwrap(), "lvchange --deltag blockd.new san/cell-one");
    for refused in [lvm.mark_new(&cell("two")), lvm.finish(&cell("two"))] {
        assert!(matches!(refused, Err(HostsError::NotHeld { .. })), "{refused:?}");
    }
}

#[test]
fn a_cell_grows_by_whole_extents() {
    let (lvm, lines) = group(&[("vgs", GROUP), ("lvextend", ""), ("lvs", VOLUMES)], "");
    lvm.extend(&cell("one"), (8 << 20) + 1).unwrap();
    let grown = "lvextend --yes -L 12582912b san/cell-one";
    assert!(lines.lock().iter().any(|line| line == grown), "{:?}", lines.lock());
}

#[test]
fn a_lease_is_freed_where_the_fenced_host_has_it_alone() {
    let answers = &[("lvs", VOLUMES), ("sanlock direct read", LEADER), ("sanlock direct init", "")];
    let (lvm, lines) = group(answers, "");
    for (host, generation) in [(1, 3), (2, 2), (2, 4)] {
        let other = Owner { host: HostNumber(host), generation };
        lvm.free(&cell("two"), other).unwrap();
    }
    assert!(!lines.lock().iter().any(|line| line.contains(" init ")), "it is another's");
    lvm.free(&cell("two"), Owner { host: HostNumber(2), generation: 3 }).unwrap();
    let freed = "sanlock direct init -r lvm_san:a-b-c:/dev/mapper/san-lvmlock:70254592";
    assert_eq!(lines.lock().last().unwrap(), freed);
}

#[test]
fn a_lease_that_is_freed_keeps_its_size() {
    let (lvm, lines) = group(
        &[("lvs", VOLUMES), ("sanlock direct read", LARGE_LEADER), ("sanlock direct init", "")],
        "",
    );
    lvm.free(&cell("two"), Owner { host: HostNumber(2), generation: 3 }).unwrap();
    let freed =
        "sanlock direct init -Z 4096 -A 8M -r lvm_san:a-b-c:/dev/mapper/san-lvmlock:70254592";
    assert_eq!(lines.lock().last().unwrap(), freed);
    assert_eq!(lease::sizes("sector_size 4096\nmax_hosts 250").unwrap()[3], "1M");
    // One that is not known is left as it is.
    lease::sizes("sector_size 4096\nmax_hosts 7").unwrap_err();
    lease::sizes("").unwrap_err();
}

#[test]
fn a_host_that_is_cut_off_replaces_all_tables_of_the_group_and_then_drops_its_locks() {
    const NAMES: &str = "san-cell--one\t(254:3)\nsan-root\t(254:1)\nsan-lvmlock\t(254:0)\n\
                         san--x-cell--one\t(254:4)\nother-root\t(254:5)\n";
    let answers = &[("dmsetup ls", NAMES), ("dmsetup wipe_table", ""), ("lvmlockctl", "")];
    let (lvm, lines) = group(answers, "");
    lvm.cut_off().unwrap();
    let wiped = ["san-cell--one", "san-root"]
        .map(|name| format!("dmsetup wipe_table --force --noflush --nolockfs {name}"));
    let [one, root] = wiped.each_ref().map(String::as_str);
    assert_eq!(*lines.lock(), ["dmsetup ls", one, root, "lvmlockctl --drop san"]);
    // The leases stay where the devices do.
    let (lvm, lines) = group(&[("dmsetup ls", NAMES)], "busy");
    lvm.cut_off().unwrap_err();
    assert_eq!(*lines.lock(), ["dmsetup ls", one]);
}

#[test]
fn a_group_is_in_use_while_it_has_locks_or_devices_here() {
    const STATUS: &str = "s lvm_san:7:/dev/mapper/san-lvmlock:0\n";
    const LOCKS: &str = "san-lvmlock\t(254:0)\n";
    const NAMES: &str = "san-root\t(254:1)\n";
    for (status, names, is_in_use) in
        [(STATUS, LOCKS, true), ("", NAMES, true), ("s lvm_sand:7:x\n", LOCKS, false)]
    {
        let answers = Box::leak(Box::new([("sanlock client", status), ("dmsetup ls", names)]));
        let (lvm, _) = group(answers, "");
        assert_eq!(lvm.is_in_use().unwrap(), is_in_use, "{status:?} {names:?}");
    }
}

#[test]
fn the_address_of_a_host_is_in_a_tag() {
    for address in ["host-a.example:7020", "[fe80::1]:7020", "10.0.0.2:1"] {
        let tag = address_tag(HostNumber(12), address).unwrap();
        assert_eq!(tag_address(&tag, HostNumber(12)).as_deref(), Some(address), "{tag}");
        assert_eq!(tag_address(&tag, HostNumber(1)), None);
    }
    let problem = address_tag(HostNumber(1), "host a:1").unwrap_err();
    assert!(problem.contains("must be HOST:PORT"), "{problem}");
}

#[test]
fn a_host_that_is_forgotten_loses_the_tags_of_the_key_that_was_named_alone() {
    const TAGS: &str = r#"{"report":[{"vg":[{"vg_size":"1","vg_free":"1","vg_extent_size":"1",
        "vg_lock_type":"sanlock","pv_name":"/dev/sda","pv_uuid":"one",
        "vg_tags":"blockd.key.2.0xb1000200000009,blockd.at.2.b:1,site,blockd.at.12.c:1,blockd.node.2.0000002a"}]}]}"#;
    let (lvm, lines) = group(&[("vgs", TAGS), ("vgchange", "")], "");
    let key = Key::new(HostNumber(2), 9);
    lvm.forget_host(HostNumber(2), Some(key)).unwrap();
    let changed = "vgchange --yes --deltag blockd.key.2.0xb1000200000009 --deltag blockd.at.2.b:1 \
                   --deltag blockd.node.2.0000002a san";
    assert_eq!(lines.lock()[1], changed);
    assert_eq!(lvm.nodes().unwrap(), [(HostNumber(2), 42)]);
    lvm.publish_node(HostNumber(2), 43).unwrap();
    let changed =
        "vgchange --yes --deltag blockd.node.2.0000002a --addtag blockd.node.2.0000002b san";
    assert_eq!(lines.lock().last().unwrap(), changed);
    lines.lock().clear();
    for present in [None, Some(Key::new(HostNumber(2), 8))] {
        let error = lvm.forget_host(HostNumber(2), present).unwrap_err();
        assert!(matches!(error, HostsError::CameBack { .. }), "{error}");
    }
    // Nothing names it, so nothing is changed.
    lvm.forget_host(HostNumber(3), None).unwrap();
    assert!(lines.lock().iter().all(|line| line.starts_with("vgs")));
}
