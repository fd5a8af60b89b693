//! Bad input: what is too long, too much, at the same time, or no request at all.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    ControllerExpandVolumeRequest, ControllerGetVolumeRequest, ControllerModifyVolumeRequest,
    CreateSnapshotRequest, CreateVolumeRequest, DeleteVolumeRequest, GetSnapshotRequest,
    ListSnapshotsRequest, ListVolumesRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, ProbeRequest,
    ValidateVolumeCapabilitiesRequest,
};
use tonic::{Code, Request};

use crate::csi::case::Need::Rows;
use crate::csi::case::{CREATE, EXPAND, GET, GET_SNAPSHOT, LIST, MODIFY, SNAPSHOT, STAGE, cases};
use crate::csi::cx::{Cx, mounted_as, one, range, refused, refused_as};

/// Calls at once on one volume.
const AT_ONCE: i64 = 200;

cases! { [CREATE]
    a_name_of_a_mebibyte_is_refused;
    an_id_of_a_mebibyte_is_refused: EXPAND, GET, MODIFY, SNAPSHOT, GET_SNAPSHOT;
    a_token_of_a_mebibyte_is_refused: LIST;
    a_file_system_of_a_mebibyte_is_refused;
    an_id_of_a_mebibyte_is_refused_by_the_node: STAGE;
    parameters_beyond_4_kib_are_refused;
    secrets_beyond_4_kib_are_refused: Rows;
    mount_flags_beyond_4_kib_are_refused: Rows;
    two_hundred_calls_for_one_name_make_one_volume;
    two_hundred_deletions_of_one_volume_are_ok;
    two_hundred_expansions_of_one_volume_end_at_the_largest: EXPAND, GET;
    two_hundred_snapshots_of_one_name_are_one: SNAPSHOT;
    a_call_that_ran_out_of_time_is_resumed_by_its_repeat;
    bytes_that_are_no_request_do_no_harm;
}

fn mebibyte() -> String {
    "x".repeat(1 << 20)
}

fn a_name_of_a_mebibyte_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let request = CreateVolumeRequest { name: mebibyte(), ..cx.request() };
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn an_id_of_a_mebibyte_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let volume_id = mebibyte();
    let driver = cx.driver;
    let codes = [Code::InvalidArgument, Code::NotFound];
    // An invalid id names no volume, so that deleting it may succeed.
    match cx.delete(&volume_id) {
        Ok(()) => {}
        answer => drop(refused(answer, Code::InvalidArgument)?),
    }
    let request = ControllerGetVolumeRequest { volume_id: volume_id.clone() };
    refused_as(driver.controller_get_volume(request), &codes)?;
    let request = ControllerExpandVolumeRequest {
        volume_id: volume_id.clone(),
        capacity_range: range(cx.options.size, 0),
        ..Default::default()
    };
    refused_as(driver.controller_expand_volume(request), &codes)?;
    let request =
        ControllerModifyVolumeRequest { volume_id: volume_id.clone(), ..Default::default() };
    refused_as(driver.controller_modify_volume(request), &codes)?;
    let request = ValidateVolumeCapabilitiesRequest {
        volume_id: volume_id.clone(),
        volume_capabilities: vec![cx.mount(Mode::SingleNodeWriter)],
        ..Default::default()
    };
    refused_as(driver.validate_volume_capabilities(request), &codes)?;
    let request = cx.snapshot_request(&volume_id);
    refused_as(cx.snapshot(&request), &codes)?;
    let volume = cx.volume()?;
    let request = cx.snapshot_request(&volume.volume_id);
    let request = CreateSnapshotRequest { name: volume_id.clone(), ..request };
    refused(cx.snapshot(&request), Code::InvalidArgument)?;
    let request = GetSnapshotRequest { snapshot_id: volume_id, ..Default::default() };
    refused_as(driver.get_snapshot(request), &codes)?;
    Ok(())
}

fn a_token_of_a_mebibyte_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let codes = [Code::InvalidArgument, Code::Aborted];
    let request = ListVolumesRequest { starting_token: mebibyte(), ..Default::default() };
    refused_as(cx.driver.list_volumes(request), &codes)?;
    let request = ListSnapshotsRequest { starting_token: mebibyte(), ..Default::default() };
    refused_as(cx.driver.list_snapshots(request), &[codes[0], codes[1], Code::Unimplemented])?;
    Ok(())
}

fn a_file_system_of_a_mebibyte_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let mut request = cx.request();
    request.volume_capabilities = vec![mounted_as(&mebibyte(), Mode::SingleNodeWriter)];
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    // An answer must not be as long as what it refuses.
    ensure!(status.message().len() < 4096, "a message of {} bytes", status.message().len());
    Ok(())
}

fn an_id_of_a_mebibyte_is_refused_by_the_node(cx: &mut Cx<'_>) -> Result<()> {
    let codes = [Code::InvalidArgument, Code::NotFound];
    let (volume_id, path) = (mebibyte(), "/var/lib/kubelet/suite".to_owned());
    let volume_capability = Some(cx.mount(Mode::SingleNodeWriter));
    let stage = NodeStageVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: path.clone(),
        volume_capability: volume_capability.clone(),
        ..Default::default()
    };
    refused_as(cx.driver.node_stage_volume(stage), &codes)?;
    let publish = NodePublishVolumeRequest {
        volume_id: volume_id.clone(),
        staging_target_path: path.clone(),
        target_path: path.clone(),
        volume_capability,
        ..Default::default()
    };
    refused_as(cx.driver.node_publish_volume(publish), &codes)?;
    let unpublish =
        NodeUnpublishVolumeRequest { volume_id: volume_id.clone(), target_path: mebibyte() };
    refused_as(cx.driver.node_unpublish_volume(unpublish), &codes)?;
    let unstage = NodeUnstageVolumeRequest { volume_id, staging_target_path: mebibyte() };
    refused_as(cx.driver.node_unstage_volume(unstage), &codes)?;
    Ok(())
}

/// Entries of 40 bytes that are 8 KiB in all.
fn much() -> impl Iterator<Item = (String, String)> {
    (0..205).map(|number| (format!("key-{number:016}"), format!("value-{number:014}")))
}

fn parameters_beyond_4_kib_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    let mut request = cx.request();
    request.parameters.extend(much());
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    ensure!(status.message().len() < 4096, "a message of {} bytes", status.message().len());
    let request = CreateVolumeRequest {
        parameters: one("csi.storage.k8s.io/pvc/name", &mebibyte()),
        ..cx.request()
    };
    refused(cx.create(&request), Code::InvalidArgument).map(|_| ())
}

fn secrets_beyond_4_kib_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    let request = CreateVolumeRequest { secrets: much().collect(), ..cx.request() };
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    ensure!(!status.message().contains("value-"), "an error has a secret: {}", status.message());
    let request =
        DeleteVolumeRequest { volume_id: "nothing".to_owned(), secrets: much().collect() };
    refused(cx.driver.delete_volume(request), Code::InvalidArgument).map(|_| ())
}

fn mount_flags_beyond_4_kib_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    use blockd_csi::proto::volume_capability::{AccessType, MountVolume};
    let mount_flags = much().map(|(key, _)| format!("{key}-secret-flag")).take(200).collect();
    let mut request = cx.request();
    request.volume_capabilities[0].access_type =
        Some(AccessType::Mount(MountVolume { mount_flags, ..Default::default() }));
    let status = refused(cx.create(&request), Code::InvalidArgument)?;
    ensure!(!status.message().contains("secret-flag"), "an error has a flag: {}", status.message());
    Ok(())
}

/// Sends requests at once, and gives the answers' values and codes.
macro_rules! at_once {
    ($cx:expr, $call:ident, $request:expr) => {{
        let cx: &Cx<'_> = $cx;
        let limit = cx.options.limit;
        let mut tasks = Vec::new();
        let runtime = cx.driver.runtime();
        for number in 0..AT_ONCE {
            let mut request = Request::new($request(number));
            request.set_timeout(limit);
            let mut client = cx.driver.controller();
            tasks.push(runtime.spawn(async move { client.$call(request).await }));
        }
        let mut fine = Vec::new();
        for task in tasks {
            match runtime.block_on(task).context("a call did not end")? {
                Ok(answer) => fine.push(answer.into_inner()),
                Err(status) if status.code() == Code::Aborted => {}
                Err(status) => return Err(status.into()),
            }
        }
        ensure!(!fine.is_empty(), "all of them were refused with ABORTED");
        fine
    }};
}

fn two_hundred_calls_for_one_name_make_one_volume(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let answers = at_once!(cx, create_volume, |_| request.clone());
    // A caller that was rejected tries again.
    let last = cx.create(&request)?;
    for answer in answers {
        ensure!(answer.volume.as_ref() == Some(&last), "{answer:?} and {last:?}");
    }
    Ok(())
}

fn two_hundred_deletions_of_one_volume_are_ok(cx: &mut Cx<'_>) -> Result<()> {
    let volume_id = cx.volume()?.volume_id;
    let request = DeleteVolumeRequest { volume_id: volume_id.clone(), ..Default::default() };
    at_once!(cx, delete_volume, |_| request.clone());
    cx.delete(&volume_id)?;
    Ok(())
}

fn two_hundred_expansions_of_one_volume_end_at_the_largest(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = |number: i64| volume.capacity_bytes + (1 << 20) * number;
    let request = |number: i64| ControllerExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        capacity_range: range(size(number), 0),
        ..Default::default()
    };
    let answers = at_once!(cx, controller_expand_volume, request);
    let largest = answers.iter().map(|answer| answer.capacity_bytes).max().unwrap_or(0);
    let asked = ControllerGetVolumeRequest { volume_id: volume.volume_id.clone() };
    let got = cx.driver.controller_get_volume(asked)?.volume.context("no volume")?;
    ensure!(got.capacity_bytes == largest, "{largest} was answered, {got:?}");
    Ok(())
}

fn two_hundred_snapshots_of_one_name_are_one(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = cx.snapshot_request(&volume.volume_id);
    let answers = at_once!(cx, create_snapshot, |_| request.clone());
    let last = cx.snapshot(&request)?;
    for answer in answers {
        let id = answer.snapshot.map(|snapshot| snapshot.snapshot_id);
        ensure!(id.as_ref() == Some(&last.snapshot_id), "{id:?} and {last:?}");
    }
    Ok(())
}

fn a_call_that_ran_out_of_time_is_resumed_by_its_repeat(cx: &mut Cx<'_>) -> Result<()> {
    for micros in [1, 50, 200, 1000, 3000] {
        let request = cx.request();
        let hasty = cx.driver.within(Duration::from_micros(micros));
        match hasty.create_volume(request.clone()) {
            Ok(_) => {}
            Err(status) => {
                let codes = [Code::DeadlineExceeded, Code::Cancelled];
                ensure!(codes.contains(&status.code()), "after {micros} µs: {status}");
            }
        }
        // The first may go on for a while.
        let mut answer = cx.create(&request);
        for _ in 0..3000 {
            if answer.as_ref().is_ok_and(|_| true) {
                break;
            }
            refused(answer, Code::Aborted)?;
            std::thread::sleep(Duration::from_millis(20));
            answer = cx.create(&request);
        }
        answer?;
    }
    Ok(())
}

fn bytes_that_are_no_request_do_no_harm(cx: &mut Cx<'_>) -> Result<()> {
    let mut rng = fastrand::Rng::with_seed(1);
    let preface: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    for round in 0..64 {
        let mut stream = UnixStream::connect(cx.driver.socket())?;
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        let mut bytes = if round % 2 == 0 { preface.to_vec() } else { Vec::new() };
        let count = rng.usize(..4096);
        bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(count));
        // It may hang up in the middle.
        let _ = stream.write_all(&bytes);
        let _ = stream.read(&mut [0; 64]);
    }
    let answer = cx.driver.probe(ProbeRequest {}).context("after 64 strangers")?;
    ensure!(answer.ready != Some(false), "it is no longer ready");
    Ok(())
}
