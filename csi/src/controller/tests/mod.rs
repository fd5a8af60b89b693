//! The controller on a daemon that keeps volumes in memory.

mod cells;
mod classes;
mod cuts;
mod encryption;
mod health;
mod input;
mod labels;
mod lists;
mod pmem;
mod volumes;

use std::collections::HashMap;

use tonic::{Code, Request, Response, Status};

use crate::proto;
use crate::proto::controller_server::Controller as _;
use crate::proto::volume_capability::access_mode::Mode;
use crate::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use crate::proto::volume_content_source::{SnapshotSource, Type, VolumeSource};

use super::Service;

fn mount(mode: Mode) -> proto::VolumeCapability {
    proto::VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn block(mode: Mode) -> proto::VolumeCapability {
    let access_type = Some(AccessType::Block(BlockVolume {}));
    proto::VolumeCapability { access_type, ..mount(mode) }
}

fn range(required_bytes: i64, limit_bytes: i64) -> Option<proto::CapacityRange> {
    Some(proto::CapacityRange { required_bytes, limit_bytes })
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// A block volume of that name and size.
fn volume_request(name: &str, required: i64) -> proto::CreateVolumeRequest {
    proto::CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: range(required, 0),
        volume_capabilities: vec![block(Mode::SingleNodeMultiWriter)],
        ..Default::default()
    }
}

fn from_snapshot(id: &str) -> Option<proto::VolumeContentSource> {
    let r#type = Some(Type::Snapshot(SnapshotSource { snapshot_id: id.to_owned() }));
    Some(proto::VolumeContentSource { r#type })
}

fn from_volume(id: &str) -> Option<proto::VolumeContentSource> {
    let r#type = Some(Type::Volume(VolumeSource { volume_id: id.to_owned() }));
    Some(proto::VolumeContentSource { r#type })
}

/// The code and the message of a refused call.
fn refused<T: std::fmt::Debug>(answer: Result<Response<T>, Status>) -> (Code, String) {
    let status = answer.unwrap_err();
    assert!(status.details().is_empty(), "the specification allows no details");
    assert!(!status.message().is_empty());
    (status.code(), status.message().to_owned())
}

async fn make(service: &Service, request: proto::CreateVolumeRequest) -> proto::Volume {
    let answer = service.create_volume(Request::new(request)).await.unwrap();
    answer.into_inner().volume.unwrap()
}

async fn snapshot(service: &Service, source: &str, name: &str) -> proto::Snapshot {
    let request = proto::CreateSnapshotRequest {
        source_volume_id: source.to_owned(),
        name: name.to_owned(),
        ..Default::default()
    };
    let answer = service.create_snapshot(Request::new(request)).await.unwrap();
    answer.into_inner().snapshot.unwrap()
}

async fn delete(service: &Service, id: &str) -> Result<(), Status> {
    let volume_id = id.to_owned();
    let request = proto::DeleteVolumeRequest { volume_id, ..Default::default() };
    service.delete_volume(Request::new(request)).await.map(|_| ())
}

async fn delete_snapshot(service: &Service, id: &str) -> Result<(), Status> {
    let snapshot_id = id.to_owned();
    let request = proto::DeleteSnapshotRequest { snapshot_id, ..Default::default() };
    service.delete_snapshot(Request::new(request)).await.map(|_| ())
}
