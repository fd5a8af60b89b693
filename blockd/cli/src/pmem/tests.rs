use std::sync::Arc;

use blockd_media::error::ErrorKind;
use blockd_pmem::platform::testing::{FakeHost, FakeSpec, Shown};
use blockd_pmem::platform::{Kernel, Mode, RegionKey};

use super::adopt::Into;
use super::*;
use crate::args::Global;
use crate::output::Output;
use crate::program::testing::Absent;

const GIB: u64 = 1 << 30;

fn context() -> Context {
    let global = Global {
        socket: None,
        json: true,
        bytes: false,
        timeout: std::time::Duration::from_secs(1),
    };
    Context { global, output: Output::new(true, false), program: &Absent }
}

fn host() -> Host {
    Host { sysfs_root: None }
}

fn create(region: Option<&str>, percentage: u64) -> Create {
    Create {
        region: region.map(ToOwned::to_owned),
        numa_node: None,
        percentage,
        size: None,
        pool: "pmem".to_owned(),
        host: host(),
    }
}

fn sizes(host: &Arc<FakeHost>) -> Vec<u64> {
    let inventory = host.platform().read().unwrap();
    inventory.namespaces().map(|(_, one)| one.size).collect()
}

/// Row: P8.
#[test]
fn create_can_be_repeated_and_counts_what_is_there() {
    let fake = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, 2 * GIB)]);
    let platform = fake.platform();
    create(None, 50).run(&platform, &context()).unwrap();
    create(None, 50).run(&platform, &context()).unwrap();
    assert_eq!(sizes(&fake), [GIB]);
    create(Some("0x1"), 25).run(&platform, &context()).unwrap();
    assert_eq!(sizes(&fake), [GIB / 4, GIB]);
    let inventory = platform.read().unwrap();
    assert!(inventory.namespaces().all(|(_, one)| one.mode == Mode::Devdax));
}

#[test]
fn create_refuses_what_is_not_there_or_not_allowed() {
    let fake = FakeHost::new(&[FakeSpec::new(1, GIB)]);
    let refused = |create: Create| {
        let error = create.run(&fake.platform(), &context()).unwrap_err();
        (error.kind(), error.to_string())
    };
    let (kind, text) = refused(create(Some("0x7"), 50));
    assert_eq!((kind, text.as_str()), (ErrorKind::NotFound, "region 0x7 does not exist"));
    for percentage in [0, 101] {
        let (kind, text) = refused(create(None, percentage));
        assert_eq!(kind, ErrorKind::Invalid);
        assert_eq!(text, format!("percentage is {percentage}: must be from 1 to 100"));
    }
    assert_eq!(refused(create(Some("region0"), 50)).0, ErrorKind::Invalid);
    let large = Create { size: Some("2G".to_owned()), ..create(Some("0x1"), 100) };
    let (kind, text) = refused(large);
    assert_eq!(kind, ErrorKind::NoSpace);
    assert!(text.starts_with("region 0x1: no space: 2147483648 bytes needed"), "{text}");
    assert_eq!(fake.writes(), 0);
}

#[test]
fn adopt_takes_what_is_bare_unused_and_empty() {
    let labelled = FakeSpec::new(2, GIB);
    let fake = FakeHost::new(&[FakeSpec::new(1, GIB).without_labels(), labelled]);
    let platform = fake.platform();
    let adopt = |region: &str, dry_run| Adopt {
        region: region.to_owned(),
        mode: Into::Devdax,
        dry_run,
        host: host(),
    };
    let refused = |region: &str| {
        let error = adopt(region, true).run(&platform, &context()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse);
        error.to_string()
    };
    create(Some("0x2"), 50).run(&platform, &context()).unwrap();
    let writes = fake.writes();
    assert!(refused("0x2").contains("keeps namespaces in labels"));
    fake.mount("pmem0", Some("/mnt"));
    assert!(refused("0x1").contains("mounted at /mnt"));
    fake.mount("pmem0", None);
    fake.set_open("pmem0", true);
    assert!(refused("0x1").contains("open in process 77"));
    fake.set_open("pmem0", false);
    let write = |bytes: &[u8]| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(fake.device("pmem0")).unwrap();
        file.write_all_at(bytes, 1080).unwrap();
    };
    write(b"\x53\xef");
    assert!(refused("0x1").contains("holds something"));
    write(&[0; 2]);
    adopt("0x1", true).run(&platform, &context()).unwrap();
    assert_eq!(fake.writes(), writes);
    adopt("0x1", false).run(&platform, &context()).unwrap();
    let after = fake.writes();
    adopt("0x1", false).run(&platform, &context()).unwrap();
    assert_eq!(fake.writes(), after);
    let inventory = platform.read().unwrap();
    let region = inventory.region(&RegionKey::Cookie(1)).unwrap();
    assert_eq!(region.namespaces[0].mode, Mode::Devdax);
}

#[test]
fn list_and_show_need_no_daemon_and_name_what_they_can_not_read() {
    let fake = FakeHost::new(&[FakeSpec::new(1, GIB).of_ways(2)]);
    let host = Host { sysfs_root: Some(fake.root().to_path_buf()) };
    let list = List { host: host.clone() };
    list.run(&host.platform(), &context()).unwrap();
    let show = |which: &str| {
        let show = Show { which: which.to_owned(), host: host.clone() };
        show.run(&host.platform(), &context())
    };
    show("0x1").unwrap();
    assert_eq!(show("0x2").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(show("region0").unwrap_err().kind(), ErrorKind::Invalid);
    std::fs::remove_file(fake.places().sys.join("bus/nd/devices/region0/size")).unwrap();
    let error = list.run(&host.platform(), &context()).unwrap_err().to_string();
    assert!(error.contains("region0/size"), "{error}");
}

#[test]
fn disabled_namespaces_are_listed() {
    let fake = FakeHost::new(&[FakeSpec::new(1, GIB), FakeSpec::new(2, GIB)]);
    let platform = fake.platform();
    let listed = || list::not_enabled(&platform.read().unwrap());
    create(Some("0x1"), 50).run(&platform, &context()).unwrap();
    assert_eq!(listed(), "");
    let inventory = platform.read().unwrap();
    let (_, made) = inventory.namespaces().next().unwrap();
    let unbind = fake.places().sys.join("bus/nd/drivers/dax_pmem/unbind");
    fake.write(&unbind, made.holder.as_ref().unwrap()).unwrap();
    fake.show_region_as(2, Shown::NotEnabled);
    let lines = listed();
    assert!(lines.starts_with("region 0x2 is not enabled"), "{lines}");
    assert!(lines.contains(&made.uuid.unwrap().to_string()) && lines.lines().count() == 2);
}
