//! The machinery for virtual machines does what tests count on.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::fs::File;

use blockd_testkit::folder::Folder;
use blockd_tests::vm::forgetful::Disk;
use blockd_tests::vm::{Drive, Vm, Which};

#[test]
fn a_script_runs_on_a_real_kernel_with_modules_and_disks() {
    let disk = std::env::temp_dir().join(format!("blockd-vm-disk-{}", std::process::id()));
    std::fs::write(&disk, [b'x'; 1 << 20]).unwrap();
    let vm = Vm::new("script")
        .modules(&["dm-delay", "ublk_drv", "nbd"])
        .programs(&["dmsetup"])
        .drive(Drive::File(disk.clone()));
    let mut running = vm
        .start(
            "echo ready
             read -r word; echo \"heard $word\"
             dmsetup targets
             head -c 3 /dev/vda; echo
             printf abc | dd of=/dev/vda conv=fsync 2>/dev/null
             ls /dev/ublk-control",
        )
        .unwrap();
    running.wait_for("ready").unwrap();
    running.send("this").unwrap();
    running.wait_for("heard this").unwrap();
    let output = running.finish().unwrap();
    let written = std::fs::read(&disk).unwrap();
    std::fs::remove_file(&disk).unwrap();
    for said in ["delay ", "xxx", "/dev/ublk-control"] {
        assert!(output.text.contains(said), "no {said} in:\n{}", output.text);
    }
    assert_eq!(&written[..4], b"abcx");
}

#[test]
fn a_failing_script_is_an_error_with_what_it_said() {
    let error = Vm::new("failing").run("echo last words; exit 7").unwrap_err().to_string();
    assert!(error.contains("ended with 7") && error.contains("last words"), "{error}");
    let kept = error.rsplit("kept in ").next().unwrap();
    assert!(std::path::Path::new(kept).join("output").exists(), "{error}");
    std::fs::remove_dir_all(kept).unwrap();
}

#[test]
fn both_kernels_boot_and_have_ublk() {
    for (which, starts) in [(Which::Older, "6.12."), (Which::Newer, "")] {
        let vm = Vm::new("kernels").kernel(which).modules(&["ublk_drv"]);
        let output = vm.run("uname -r; test -c /dev/ublk-control && echo ublk").unwrap();
        let release = output.text.lines().next().unwrap();
        assert!(release.starts_with(starts) && which.is(release), "{release}");
        assert!(output.text.contains("ublk"), "{}", output.text);
        println!("{release}: {:.1} s", output.seconds);
    }
}

#[test]
fn a_guest_has_disks_of_every_kind() {
    let folder = Folder::new("drives").unwrap();
    let file = |name: &str, mib: u64| {
        let path = folder.path().join(name);
        std::fs::write(&path, name).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(mib << 20).unwrap();
        path
    };
    let vm = Vm::new("drives")
        .drive(Drive::File(file("virtio", 1)))
        .drive(Drive::Nvme(file("nvme", 1)))
        .drive(Drive::Nvdimm(file("memory", 128)));
    let script = "for disk in vda nvme0n1 pmem0; do head -c 6 /dev/$disk | tr '\\0' ' '; done";
    let output = vm.run(script).unwrap();
    assert!(output.text.contains("virtionvme  memory"), "{}", output.text);
}

#[test]
fn a_complaint_of_the_kernel_fails_the_run_unless_it_was_expected() {
    let script = "echo '<4>WARNING: at nothing' >/dev/kmsg; cat /proc/sys/kernel/hung_task*secs";
    let error = Vm::new("complaint").run(script).unwrap_err().to_string();
    assert!(error.contains("the kernel complained:\n") && error.contains("nothing"), "{error}");
    let kept = error.rsplit("kept in ").next().unwrap();
    std::fs::remove_dir_all(kept).unwrap();
    let output = Vm::new("complaint").expects("WARNING: at nothing").run(script).unwrap();
    assert!(output.text.contains("120"), "stuck tasks are not looked for: {}", output.text);
}

/// The host's file has what a guest wrote whether it flushed or not; a disk that forgets does not.
#[test]
fn a_machine_that_loses_power_finds_what_it_flushed() {
    let folder = Folder::new("power").unwrap();
    let (file, socket) = (folder.path().join("file"), folder.path().join("socket"));
    File::create(&file).unwrap().set_len(4 << 20).unwrap();
    let disk = Disk::new(&file, &socket, 5).unwrap();
    let vm = Vm::new("power").drive(disk.drive());
    let mut running = vm
        .start(
            "head -c 1048576 /dev/zero | tr '\\0' a | dd of=/dev/vda bs=64k conv=fsync
             head -c 1048576 /dev/zero | tr '\\0' b | dd of=/dev/vda bs=64k seek=16 oflag=direct
             echo written
             sleep 100",
        )
        .unwrap();
    running.wait_for("written").unwrap();
    running.cut().unwrap();
    let cut = disk.cut().unwrap();
    assert!(cut.lost > 0 && cut.kept > 0 && cut.lost + cut.kept == 2048, "{cut:?}");
    let count = "tr -dc a </dev/vda | wc -c; tr -dc b </dev/vda | wc -c";
    let output = vm.run(count).unwrap();
    let counts: Vec<u64> = output.text.lines().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(counts, [1 << 20, cut.kept * 512]);
}
