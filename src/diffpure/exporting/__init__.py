"""Networks and whole purifiers as files of ONNX and OpenVINO, each compared with torch before it is written."""
